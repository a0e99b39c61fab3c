"""What keeps a launch from its workers, and a launch that dies itself: words, exit codes, nothing left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local import Machine, ending, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small file system, which only root may do; run the slow tests as root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def refused(machine: Machine, run: str, code: int, *words: str) -> None:
    """A launch ends with ``code`` and one line that holds all ``words``, in the record too; nothing is left."""
    done = machine.launch(50, run, "--detach")
    assert done.returncode == code, done.stderr
    error, hint = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    for word in words:
        assert word in error + hint, (word, error, hint)
    assert f"nothing of {run} is left on this machine" in done.stderr
    assert machine.processes(run) == {}
    status = machine.status(run)
    assert (status["state"], status["detail"]) == ("failed", error.removeprefix("error: "))
    assert {cell["state"] for cell in status["cells"]} <= {"stopped"}


def test_a_node_that_is_not_fit(machine: Machine, small_disk: Path) -> None:
    (machine.root / "file").write_text("")
    machine.site("west", work_dir=str(machine.root / "file" / "below"))
    refused(machine, "no-folder", 4, "west/local: cannot write into the work folder", "Not a directory", "work_dir")

    machine.site("west", work_dir=str(small_disk))
    refused(machine, "no-space", 4, f"west/local: {small_disk} has ", "200 MB are the least", "work_dir")

    machine.site("west", environment={"python": "/nowhere/python3"})
    refused(machine, "no-python", 4, "west/local: cannot run /nowhere/python3", "environment.python")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(machine.root / "bare")], check=True)
    bare = str(machine.root / "bare" / "bin" / "python")
    machine.site("west", environment={"python": bare})
    refused(
        machine, "no-torch", 4, f"west/local: {bare} lacks what a worker needs: torch (", "-m pip install 'torch>="
    )
    machine.site("west")

    machine.changes = {"data": {"paths": ["/nowhere"]}}
    refused(machine, "no-text", 4, "2 of 2 nodes: east/local: data.paths: '/nowhere' gives no file", "data.suffixes")
    machine.changes = {"data": {"limit_bytes": "700 B"}}
    refused(machine, "little-text", 4, "bytes of held-out text; one sequence needs 65", "raise data.limit_bytes")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        machine.changes = {"relay": {"port": port}}
        refused(
            machine, "no-port", 4, f"this machine: the relay cannot listen at 127.0.0.1 port {port}", "relay.port"
        )

    # what the other commands say of a launch that failed
    resumed = machine.islandctl("resume", "no-port")
    assert resumed.returncode == 2
    assert "no-port: its launch never got to the workers" in resumed.stderr
    stopped = machine.islandctl("stop", "no-port")
    assert (stopped.returncode, stopped.stdout) == (0, "nothing of no-port is left on this machine\n")
    shown = machine.islandctl("status", "no-torch")
    assert shown.returncode == 0
    assert shown.stdout.startswith("no-torch  failed  west/local: ")
    assert "lacks what a worker needs" in shown.stdout
    assert "mend the cause, then launch again" in shown.stdout
    assert "remove no-torch" not in shown.stdout  # nothing was started: the name is free
    assert "islandctl remove no-port frees its name" in machine.islandctl("status", "no-port").stdout
    removed = machine.islandctl("remove", "no-port")
    assert (removed.returncode, removed.stdout) == (0, f"removed: this machine: {machine.runs / 'no-port'}\n")
    assert machine.islandctl("status", "no-port").returncode == 2


def test_a_host_that_does_not_exist(machine: Machine) -> None:
    machine.site("west", scheduler="ssh", hosts=["nowhere.invalid"])
    for _ in range(2):  # the name is free again each time
        done = machine.launch(50, "lost", "--detach")
        assert done.returncode == 5, done.stderr
        assert done.stderr.count("nowhere.invalid: ") == 1, done.stderr
        assert "unknown:" not in done.stderr
        assert done.stderr.count("nothing of lost is left on this machine\n") == 1
    stopped = machine.islandctl("stop", "lost")
    assert (stopped.returncode, stopped.stdout) == (0, "nothing of lost is left on this machine\n")

    machine.site("west")
    machine.changes = {"relay": {"host": "hub.invalid"}}
    done = machine.launch(50, "lost", "--detach")
    assert done.returncode == 5, done.stderr
    assert f"error: {machine.root / 'tiny.yaml'}: relay.host: relay/hub.invalid: " in done.stderr
    assert machine.islandctl("remove", "lost").returncode == 0


def test_two_launches_of_one_name(machine: Machine) -> None:
    both = [machine.begin("launch", *machine.arguments(3000, "twin"), "--detach") for _ in range(2)]
    said = [one.communicate(timeout=240)[1] for one in both]
    codes = [one.returncode for one in both]
    assert sorted(codes) == [0, 2], said
    refusal = said[codes.index(2)]
    assert refusal.startswith("error: a run called twin exists already\nhint: islandctl status twin shows it")
    assert refusal.count("\n") == 2

    third = machine.launch(3000, "twin")
    assert (third.returncode, third.stderr) == (2, refusal)
    assert len(json.loads(machine.islandctl("runs", "--json").stdout)) == 1

    running = machine.islandctl("resume", "twin")
    assert running.returncode == 2
    assert "twin still runs on east/local, west/local" in running.stderr
    assert "islandctl stop twin ends it first" in running.stderr
    machine.until("twin", lambda seen: min(steps_of(seen)) >= 1)
    for _ in range(2):
        stopped = machine.islandctl("stop", "twin", "--deadline", "0")
        assert stopped.returncode == 0, stopped.stdout
        assert "nothing of twin is left on this machine" in stopped.stdout
        assert machine.processes("twin") == {}


@pytest.mark.parametrize("moment", ["connecting to", "relay: answers"])
def test_the_launching_process_is_killed(machine: Machine, moment: str) -> None:
    launcher = machine.begin("launch", *machine.arguments(3000, "cut"))
    assert launcher.stderr is not None
    assert any(moment in line for line in launcher.stderr)
    launcher.kill()
    launcher.wait()

    second = machine.launch(3000, "cut")
    assert second.returncode == 2
    assert "a run called cut exists already" in second.stderr
    status = machine.status("cut")
    gone = "the launch was cut short: the process that was at it is gone"
    assert (status["state"], status["detail"]) == ("failed", gone)
    assert status["hint"].startswith("islandctl stop cut clears up what it started")
    resumed = machine.islandctl("resume", "cut")
    assert resumed.returncode == 2
    assert "cut: its launch never got to the workers" in resumed.stderr

    stopped = machine.islandctl("stop", "cut")
    assert (stopped.returncode, stopped.stdout) == (0, "nothing of cut is left on this machine\n")
    assert machine.processes("cut") == {}
    status = machine.status("cut")
    assert (status["state"], status["detail"]) == ("failed", "the launch was cut short")
    assert status["hint"].startswith("mend the cause, then launch again")
    assert machine.islandctl("resume", "cut").returncode == 2


def test_the_following_process_is_killed(machine: Machine) -> None:
    follower = machine.begin("launch", *machine.arguments(40, "alone"))
    assert follower.stderr is not None
    assert any("the workers are started" in line for line in follower.stderr)
    follower.kill()
    follower.wait()
    done = machine.until("alone", lambda seen: all(cell["nodes"][0]["state"] == "ended" for cell in seen["cells"]))
    assert done["state"] == "finished"
    assert done["hint"] == "islandctl stop alone ends its relay"
    again = machine.islandctl("resume", "alone")
    assert again.returncode == 2
    assert "alone has finished: there is nothing left to do" in again.stderr
    stopped = machine.islandctl("stop", "alone")
    assert stopped.returncode == 0, stopped.stdout
    assert "alone has finished" in stopped.stdout
    assert "resume" not in stopped.stdout
    (only,) = json.loads(machine.islandctl("runs", "--json").stdout)
    assert (only["phase"], only["reason"]) == ("stopped", "finished")
    assert machine.processes("alone") == {}
    assert machine.status("alone")["hint"] == ""
