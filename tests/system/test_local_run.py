"""Two local sites with a real relay, nothing goes wrong: what each command shows of the run, and how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local import Machine, as_planned, ending, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


def test_a_run_from_launch_to_end(machine: Machine) -> None:
    follower = machine.begin("launch", *machine.arguments(60, "whole"))
    assert follower.stdout is not None
    assert any("step 20/60" in line for line in follower.stdout)
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=240)
    assert follower.returncode == 130
    assert said.splitlines()[-1] == "detached; the run goes on; islandctl status whole"

    watched = machine.islandctl("status", "whole", "--watch")
    assert watched.returncode == 0, watched.stderr
    assert "step 60/60" in watched.stdout
    assert "\x1b" not in watched.stdout + watched.stderr
    status = machine.status("whole")
    assert (status["state"], steps_of(status)) == ("finished", [60, 60])
    east, west = (cell["bits_per_byte"] for cell in status["cells"])
    assert east[-1][1] < east[0][1] - 1.0
    assert east[-1] == west[-1]
    assert status["joint_checkpoint"]["step"] == 60
    looks = machine.islandctl("status", "whole", "--watch", "--json").stdout.splitlines()
    assert [json.loads(look)["state"] for look in looks] == ["finished"]

    stopped = machine.islandctl("stop", "whole", "--json")
    assert stopped.returncode == 0, stopped.stdout
    report = json.loads(stopped.stdout)
    assert (report["left"], report["unknown"], report["hosts"]) == ([], [], ["this machine"])
    assert machine.processes("whole") == {}
    assert machine.status("whole")["state"] == "finished"
    again = machine.launch(60, "whole")
    assert again.returncode == 2
    assert "a run called whole exists already" in again.stderr

    shown = machine.islandctl("checkpoints", "whole", "--json")
    assert [row["step"] for row in json.loads(shown.stdout)["rows"] if row["resumable"]] == [40, 60]
    listed = machine.islandctl("runs", "--json")
    assert [run["run"] for run in json.loads(listed.stdout)] == ["whole"]
    west = ("logs", "whole", "--site", "west", "--rank", "0")
    lines = machine.islandctl(*west).stdout.splitlines()
    assert lines
    assert all(line.startswith("west/rank-0 | ") for line in lines)
    assert machine.islandctl(*west, "--tail", "2").stdout.splitlines() == lines[-2:]
    as_planned(machine, "whole")


def test_a_budget_ends_all_cells_at_one_step_and_a_higher_one_goes_on(machine: Machine) -> None:
    machine.changes = {"budget": {"hours": "12 s"}, "checkpoint": {"every": 1000}}
    ended = machine.launch(3000, "dear")
    assert ended.returncode == 6, ended.stderr
    status = machine.status("dear")
    assert status["state"] == "stopped"
    assert status["detail"].startswith("stopped by budget: ")
    east, west = steps_of(status)
    assert east == west == status["joint_checkpoint"]["step"] > 0
    again = machine.islandctl("resume", "dear")
    assert again.returncode == 6
    assert "its budget is used up" in again.stderr
    assert "islandctl resume dear --budget" in again.stderr
    more = machine.islandctl("resume", "dear", "--budget", "25 s")
    assert more.returncode == 6, more.stderr
    assert steps_of(machine.status("dear"))[0] > east
    assert machine.processes("dear") == {}
