"""Two cells of unequal pace, as a user starts them: both end a window together, and end with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from islandctl.ledger.entries import Commit

from .local import Machine, ending
from .tensors import model_hashes, state_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, OWN = 40, {"east": 14, "west": 7}
"""Of the run, with windows of 10; and each cell's own in a window."""
RECIPE = {
    "training": {"steps": STEPS},
    "exchange": {"pace": "measured", "window": 10, "late": {"deadline": "10 min"}},
    "checkpoint": {"every": 10},
    "evaluation": {"every": 20},
    "relay": {"emulate": {"bandwidth": "100 Mbit/s", "rtt": "60 ms"}},
}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, RECIPE)
    for name, step in (("east", "200 ms"), ("west", "400 ms")):
        made.site(name, measured={"step": step})
    with ending(made):
        yield made


def test_cells_of_unequal_pace_end_equal_and_resume_exactly(machine: Machine) -> None:
    straight = machine.launch(STEPS, "straight")
    assert straight.returncode == 0, straight.stderr + straight.stdout
    assert "east: step 28/56 " in straight.stdout
    status = machine.status("straight")
    assert (status["state"], status["step"], status["steps"]) == ("finished", STEPS, STEPS)
    for cell in status["cells"]:
        own = 4 * OWN[cell["name"]]
        assert (cell["step"], cell["steps"], cell["window"], cell["windows"]) == (own, own, 4, 4)
        assert [step for step, _ in cell["bits_per_byte"]] == [0, own // 2, own]
        lines = machine.metrics("straight", cell["name"], "train")
        assert [line["step"] for line in lines] == list(range(1, own + 1))
        assert [line["window"] for line in lines] == [step // OWN[cell["name"]] for step in range(1, own + 1)]
    # at one share of the run, here after each window, all have one learning rate
    rates = [
        [line["lr"] for line in machine.metrics("straight", name, "train") if line["step"] % own == 1]
        for name, own in OWN.items()
    ]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 4
    commits = [entry for entry in machine.ledger("straight") if isinstance(entry, Commit)]
    tokens = [[part.tokens for part in commit.named] for commit in commits if commit.window in (1, 2, 3)]
    assert tokens == 6 * [[14 * 2 * 64, 7 * 2 * 64]]
    ends = {name: machine.cell("straight", name) / "checkpoints" / "step-00000040-attempt-1" for name in OWN}
    assert model_hashes(ends["east"]) == model_hashes(ends["west"]) != {}
    assert machine.joint_steps("straight") == [10, 20, 30, 40]

    assert machine.launch(STEPS, "killed", "--detach").returncode == 0
    machine.until_joint("killed", 20)
    machine.kill_everything("killed")
    resumed = machine.islandctl("resume", "killed")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert machine.packets("killed") == machine.packets("straight")
    for name, end in ends.items():
        again = machine.cell("killed", name) / "checkpoints" / "step-00000040-attempt-2"
        assert state_hashes(again) == state_hashes(end)
        assert machine.losses("killed", name) == machine.losses("straight", name)

    told = json.loads(machine.islandctl("plan", "--from-run", "straight", "--json").stdout)
    assert {one["cell"] for one in told["comparisons"] if one["name"] == "step" and one["measured"]} == set(OWN)
