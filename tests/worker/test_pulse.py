"""A rank's pulse, as the supervisor reads it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from islandctl.fleet.supervisor import birth
from islandctl.worker.pulse import SIZE_BYTES, Pulse
from tests.disk import files_at_most


def read(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "pulse-1.json").read_text())
    return told


def test_a_beat_tells_state_step_and_the_usual_step(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, 1)
    first = read(tmp_path)
    assert (first["rank"], first["pid"], first["birth"]) == (1, os.getpid(), birth(os.getpid()))
    assert (first["state"], first["step"], first["step_s"]) == ("resting", 0, None)
    with files_at_most(SIZE_BYTES):  # a full disk: it is written over in place
        for step in range(1, 4):
            pulse.beat("training", step)
            pulse.beat("waiting")
    told = read(tmp_path)
    assert (told["state"], told["step"], told["beats"]) == ("waiting", 3, 6)
    assert told["step_s"] >= 0
    pulse.rest()
    pulse.beat("evaluating")  # as the built-in loop does at last
    assert read(tmp_path)["state"] == "resting"
    Pulse(None, 1).beat("training", 1)


def test_quit_shows_the_stacks_and_ends_nothing(tmp_path: Path) -> None:
    program = """
import pathlib, sys
from islandctl.worker.pulse import Pulse
Pulse(pathlib.Path(sys.argv[1]), 1)
def asks():
    print("ready", flush=True)
    sys.stdin.readline()
asks()
"""
    root = Path(__file__).parent.parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGQUIT)
    _, said = child.communicate("\n", timeout=60)
    assert child.returncode == 0
    assert "in asks" in said
