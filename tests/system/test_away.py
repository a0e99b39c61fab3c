"""A cell is away for some windows and comes back: the late policy decides what the other one does meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .local import Machine, ending, kill, steps_of
from .tensors import model_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 120


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


def launch(machine: Machine, then: str) -> None:
    """Both cells train, and the first joint checkpoint is there."""
    machine.changes = {"exchange": {"late": {"deadline": "3 s", "windows": 1, "then": then}}}
    started = machine.launch(STEPS, "away", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("away", 20)


def check_finished_alike(machine: Machine) -> None:
    done = machine.until("away", lambda seen: seen["state"] == "finished")
    assert steps_of(done) == [STEPS, STEPS]
    last = [machine.cell("away", cell) / "checkpoints" / f"step-{STEPS:08}-attempt-1" for cell in ("east", "west")]
    assert model_hashes(last[0]) == model_hashes(last[1]) != {}
    assert machine.islandctl("stop", "away").returncode == 0
    assert machine.processes("away") == {}


def test_the_others_go_on_alone_and_it_rejoins(machine: Machine) -> None:
    launch(machine, "alone")
    frozen = machine.find("away", "/west")
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    gone = machine.until("away", lambda seen: "counts as away" in seen["detail"])
    assert (gone["state"], gone["detail"]) == ("degraded", "west counts as away; the others go on without it")
    at = steps_of(gone)
    ahead = machine.until("away", lambda seen: steps_of(seen)[0] >= min(STEPS, at[0] + 40))
    assert steps_of(ahead)[1] == at[1]
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    check_finished_alike(machine)


def test_the_others_wait_until_it_is_mended(machine: Machine) -> None:
    launch(machine, "wait")
    killed = machine.find("away", "/west")
    kill(sorted(killed))  # the supervisor began first: nobody starts the rest again
    gone = machine.until("away", lambda seen: seen["cells"][1]["state"] == "lost")
    assert gone["state"] == "degraded"
    assert gone["hint"] == "islandctl resume away starts again what has ended"

    looks: list[tuple[float, int]] = []

    def stands(seen: dict[str, Any]) -> bool:
        """For longer than a round's deadline and a heartbeat's age: this round stays open for good."""
        waiting = seen["relay"]["rounds_open"] == 1 and seen["cells"][0]["state"] == "waiting"
        if not waiting or not seen["relay"]["rounds_empty"] or (looks and looks[0][1] != steps_of(seen)[0]):
            looks.clear()
        if waiting:
            looks.append((time.monotonic(), steps_of(seen)[0]))
        return bool(looks) and looks[-1][0] - looks[0][0] > 8.0

    waits = machine.until("away", stands)
    still = machine.status("away")
    assert steps_of(still)[0] == steps_of(waits)[0] < STEPS
    assert still["cells"][0]["state"] == "waiting"

    refused = machine.islandctl("resume", "away", "--from", "20")
    assert refused.returncode == 2
    assert "away still runs on east/local" in refused.stderr
    mended = machine.islandctl("resume", "away", "--detach")
    assert mended.returncode == 0, mended.stderr
    assert mended.stderr.splitlines() == [
        "away still runs on east/local: starting again only what does not",
        "west/local: starting its workers again",
    ]
    check_finished_alike(machine)
    assert machine.status("away")["attempt"] == 1
