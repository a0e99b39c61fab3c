"""Two cells of unequal pace, as a user starts them: killed in the middle, resumed exactly, equal at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from islandctl.ledger.entries import Commit

from .local import Machine, ending
from .tensors import model_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, WINDOWS, OWN = 50, 5, {"east": 14, "west": 7}
"""Of the run, its windows of 10, and each cell's own steps in one."""
RECIPE = {
    "exchange": {"pace": "measured", "window": 10, "late": {"deadline": "10 min"}},
    "checkpoint": {"every": 10},
    "evaluation": {"every": 20},
}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, RECIPE)
    for name, step in (("east", "200 ms"), ("west", "400 ms")):
        made.site(name, measured={"step": step})
    with ending(made):
        yield made


def test_cells_of_unequal_pace_resume_exactly_and_end_equal(machine: Machine) -> None:
    assert machine.launch(STEPS, "own", "--detach").returncode == 0
    machine.until_joint("own", 20)
    machine.kill_everything("own")
    resumed = machine.islandctl("resume", "own")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "east: step 70/70 " in resumed.stdout

    status = machine.status("own")
    assert (status["state"], status["step"], status["steps"]) == ("finished", STEPS, STEPS)
    for cell in status["cells"]:
        name, own = cell["name"], OWN[cell["name"]]
        whole = own * WINDOWS
        assert (cell["step"], cell["steps"], cell["window"], cell["windows"]) == (whole, whole, WINDOWS, WINDOWS)
        assert [step for step, _ in cell["bits_per_byte"]] == [0, 2 * own, 4 * own, whole]
        lines = machine.metrics("own", name, "train")
        assert {line["step"] for line in lines} == set(range(1, whole + 1))
        assert all(line["window"] == line["step"] // own for line in lines)
        # what the second attempt repeats is the same in every bit
        assert len({(line["step"], line["loss"], line["lr"]) for line in lines}) == whole
    assert all(len(payloads) == 1 for payloads in machine.packets("own").values())
    # at one share of the run, here after each window, all have one learning rate
    rates = [
        {line["window"]: line["lr"] for line in machine.metrics("own", name, "train") if line["step"] % own == 1}
        for name, own in OWN.items()
    ]
    assert rates[0] == rates[1]
    assert len(set(rates[0].values())) == WINDOWS
    commits = [entry for entry in machine.ledger("own") if isinstance(entry, Commit) and 0 < entry.window < WINDOWS]
    assert [[part.tokens for part in one.named] for one in commits] == len(commits) * [[14 * 2 * 64, 7 * 2 * 64]]
    ends = [machine.cell("own", name) / "checkpoints" / f"step-{STEPS:08d}-attempt-2" for name in OWN]
    assert model_hashes(ends[0]) == model_hashes(ends[1]) != {}
    assert machine.joint_steps("own") == [10 * window for window in range(1, WINDOWS + 1)]
