"""Workers that hang, that somebody else ends, and logs in pieces: a whole run, as its user meets it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.paths import log_pieces

from .local import Machine, ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORKER = {"watchdog": {"least": "8 s", "factor": 3}, "logs": "12 KiB"}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    # no emulated link: waits would only make the usual step longer, and the watchdog slower
    made = Machine(tmp_path, {"worker": WORKER, "relay": {"emulate": None}, "checkpoint": {"every": 1000}})
    made.site("east", gpu={"count": 2, "per_node": 2})
    with ending(made):
        yield made


def pulse(machine: Machine, rank: int) -> dict[str, Any]:
    path = machine.cell("run", "east") / "node-0" / f"pulse-{rank}.json"
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_a_hung_rank_and_one_that_was_asked_to_end(machine: Machine) -> None:
    started = machine.launch(100_000, "run", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_trained("run", 5)

    os.kill(pulse(machine, 1)["pid"], signal.SIGSTOP)
    seen = machine.until("run", lambda seen: seen["cells"][0]["restarts"] >= 1)
    told = seen["cells"][0]["last_end"]
    assert told.startswith("hung: no sign of life for "), told
    logs = machine.cell("run", "east") / "node-0" / "logs"
    stacks = "".join(path.read_text() for path in logs.glob("rank-1*.log"))
    assert "most recent call first" in stacks
    machine.until("run", lambda seen: seen["cells"][0]["state"] in ("training", "waiting"))

    west = machine.workers("run", "west")
    for pid in west:
        os.kill(pid, signal.SIGTERM)
    machine.until("run", lambda seen: seen["cells"][1]["last_end"] == "preempted: stopped by a signal")

    stopped = machine.islandctl("stop", "run", "--deadline", "0", "--json")
    assert stopped.returncode == 0, stopped.stdout
    report = json.loads(stopped.stdout)
    assert (report["left"], report["hosts"]) == ([], ["this machine"])
    assert "this machine: its ports are free" in report["resources"]
    pieces = log_pieces(path.name for path in logs.iterdir())["rank-0"]
    assert 1 < len(pieces) <= 4
    text = "".join((logs / name).read_text() for name in pieces)
    shown = machine.islandctl("logs", "run", "--site", "east", "--rank", "0").stdout
    assert shown == "".join(f"east/rank-0 | {line}\n" for line in text.removesuffix("\n").split("\n"))
