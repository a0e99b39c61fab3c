"""60 steps straight against 30 steps, kill -9 of everything, resume, 30 steps: equal in every bit.

One cell has two ranks, the other one, so this also holds the exchange of cells of unequal size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from islandctl.ledger.entries import Commit

from .local import Machine, ending, kill, steps_of
from .tensors import model_hashes, state_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CELLS = ("east", "west")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(
        tmp_path_factory.mktemp("exact"), {"checkpoint": {"every": 15}, "exchange": {"late": {"deadline": "10 min"}}}
    )
    made.site("east", gpu={"count": 2, "per_node": 2})
    with ending(made):
        done = made.launch(60, "straight")
        assert done.returncode == 0, done.stderr + done.stdout
        yield made


def final(machine: Machine, run: str, cell: str, attempt: int = 1) -> Path:
    """The checkpoint of the last step."""
    return machine.cell(run, cell) / "checkpoints" / f"step-00000060-attempt-{attempt}"


def check_same(machine: Machine, run: str, attempt: int) -> None:
    """Is ``run`` equal to ``straight`` in weights, losses and packets?"""
    for cell in CELLS:
        assert state_hashes(final(machine, run, cell, attempt)) == state_hashes(final(machine, "straight", cell))
        losses = machine.losses(run, cell)
        assert losses == machine.losses("straight", cell)
        assert sorted(losses) == list(range(1, 61))
    sent = machine.packets("straight")
    assert {key[0] for key in sent} == {0, 1}
    assert all(len(payloads) == 1 for payloads in sent.values())
    assert machine.packets(run) == sent


def test_cells_of_two_ranks_and_of_one_agree(machine: Machine) -> None:
    commits = [entry for entry in machine.ledger("straight") if isinstance(entry, Commit)]
    assert len(commits) == 8  # two fragments, three windows and the final round
    assert all([part.cell for part in commit.named] == [0, 1] for commit in commits)
    east, west = (cell["bits_per_byte"] for cell in machine.status("straight")["cells"])
    assert east[-1] == west[-1]
    assert east[-1][1] < east[0][1] - 1.0
    weights = [model_hashes(final(machine, "straight", cell)) for cell in CELLS]
    assert weights[0] == weights[1] != {}
    # Every packet names the anchor and outer momentum that it builds on: equal in both cells, in every round.
    assert machine.bases("straight")
    assert all(len(seen) == 1 for seen in machine.bases("straight").values())


def test_resume_after_everything_was_killed_is_exact(machine: Machine) -> None:
    started = machine.launch(60, "killed", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("killed", 30)
    machine.kill_everything("killed")
    dead = machine.status("killed")
    assert (dead["state"], dead["hint"]) == ("failed", "islandctl resume killed")
    assert dead["joint_checkpoint"]["step"] >= 30

    resumed = machine.islandctl("resume", "killed")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "attempt 2 begins at step" in resumed.stderr
    assert "relay: starting again" in resumed.stderr
    status = machine.status("killed")
    assert (status["state"], status["attempt"], steps_of(status)) == ("finished", 2, [60, 60])
    check_same(machine, "killed", 2)
    assert machine.processes("killed") == {}


def test_workers_that_come_back_and_a_stop_are_exact(machine: Machine) -> None:
    started = machine.launch(60, "hurt", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("hurt", 15)
    machine.kill("hurt", "torch.distributed.run", "/east")
    kill(machine.workers("hurt", "west"))
    machine.kill("hurt", "-m islandctl.relay")
    machine.until_joint("hurt", 30)
    kill(machine.workers("hurt", "east")[:1])
    back = machine.until("hurt", lambda seen: [cell["restarts"] for cell in seen["cells"]] == [2, 1])
    told = r"crash: rank \d \(process \d+\): killed by signal 9 \(SIGKILL\); the other rank was stopped by us"
    assert re.fullmatch(told, back["cells"][0]["last_end"])
    assert back["cells"][1]["last_end"] == "crash: killed by signal 9 (SIGKILL)"

    # an orderly stop, wherever that is, and a resume from its checkpoint
    stopped = machine.islandctl("stop", "hurt")
    assert stopped.returncode == 0, stopped.stdout
    assert machine.processes("hurt") == {}
    assert machine.status("hurt")["state"] in ("stopped", "finished"), back
    if machine.status("hurt")["state"] == "stopped":
        resumed = machine.islandctl("resume", "hurt")
        assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    check_same(machine, "hurt", machine.status("hurt")["attempt"])
