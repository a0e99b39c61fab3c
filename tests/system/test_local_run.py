"""Two local sites with a real relay: launch, status, kill, stop, resume. Nothing in here is simulated."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local import Machine, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for run in ("whole", "hurt"):
        if (tmp_path / "home" / "runs" / run).is_dir():
            made.islandctl("stop", run, "--deadline", "0")


def test_a_run_from_launch_to_end(machine: Machine) -> None:
    done = machine.launch(60, "whole")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "whole: finished" in done.stdout
    assert "nothing of whole is left" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr

    status = machine.status("whole")
    assert status["state"] == "finished"
    assert steps_of(status) == [60, 60]
    east, west = (cell["bits_per_byte"] for cell in status["cells"])
    assert east[-1][1] < east[0][1] - 1.0
    assert east[-1] == west[-1]
    assert status["joint_checkpoint"]["step"] == 60
    assert machine.processes("whole") == {}

    again = machine.launch(60, "whole")
    assert again.returncode == 2
    assert "whole exists" in again.stderr
    assert again.stderr.count("\n") <= 3

    shown = machine.islandctl("checkpoints", "whole", "--json")
    assert [row["step"] for row in json.loads(shown.stdout)["rows"] if row["joint"]][-1] == 60
    listed = machine.islandctl("runs", "--json")
    assert [run["run"] for run in json.loads(listed.stdout)] == ["whole"]
    lines = machine.islandctl("logs", "whole", "--site", "west", "--rank", "0").stdout.splitlines()
    assert lines
    assert all(line.startswith("west/rank-0 | ") for line in lines)
    assert (
        machine.islandctl("logs", "whole", "--site", "west", "--rank", "0", "--tail", "2").stdout.splitlines()
        == lines[-2:]
    )


def test_kill_stop_and_resume(machine: Machine) -> None:
    started = machine.launch(200, "hurt", "--detach", "--json")
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout)["run"] == "hurt"
    machine.until("hurt", lambda seen: min(steps_of(seen)) >= 25)
    refused = machine.islandctl("resume", "hurt")
    assert refused.returncode == 2
    assert "still runs" in refused.stderr

    (victim,) = machine.workers("hurt", "east")
    os.kill(victim, signal.SIGKILL)
    (relay,) = (pid for pid, line in machine.processes("hurt").items() if "-m islandctl.relay" in line)
    os.kill(relay, signal.SIGKILL)
    back = machine.until("hurt", lambda seen: seen["cells"][0]["restarts"] >= 1)
    before = max(steps_of(back))
    machine.until("hurt", lambda seen: min(steps_of(seen)) > before and seen["state"] in ("running", "waiting"))

    stopped = machine.islandctl("stop", "hurt")
    assert stopped.returncode == 0, stopped.stderr + stopped.stdout
    assert "nothing of hurt is left" in stopped.stdout
    assert machine.processes("hurt") == {}
    status = machine.status("hurt")
    assert status["state"] == "stopped"
    step = status["joint_checkpoint"]["step"]
    assert step >= 20

    machine.recipe(300)
    refused = machine.islandctl("resume", "hurt")
    assert refused.returncode == 2
    assert "training.steps: 200 → 300" in refused.stderr
    machine.recipe(200)

    resumed = machine.islandctl("resume", "hurt", timeout_s=200.0)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert f"attempt 2 begins at step {step}" in resumed.stderr
    status = machine.status("hurt")
    assert (status["state"], status["attempt"], steps_of(status)) == ("finished", 2, [200, 200])
    assert machine.processes("hurt") == {}


def test_detach_then_resume_after_everything_was_killed(machine: Machine) -> None:
    follower = machine.begin("launch", *machine.arguments(120, "hurt"))
    for line in follower.stdout or ():
        if "step 20/" in line:
            break
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert said.splitlines()[-1] == "detached; the run goes on; islandctl status hurt"
    seen = machine.until("hurt", lambda seen: seen["joint_checkpoint"] is not None)
    for pid in machine.processes("hurt"):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    dead = machine.status("hurt")
    assert dead["state"] == "failed"
    assert dead["hint"] == "islandctl resume hurt"
    assert dead["joint_checkpoint"]["step"] >= seen["joint_checkpoint"]["step"]

    resumed = machine.islandctl("resume", "hurt", timeout_s=200.0)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "relay: starting again" in resumed.stderr
    assert steps_of(machine.status("hurt")) == [120, 120]
    assert machine.processes("hurt") == {}
