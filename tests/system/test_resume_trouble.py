"""What dies of a running run and comes back, and what lies on disk when it does not: words and choices of resume."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from .local import Machine, ending, kill, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


def checkpoint(machine: Machine, cell: str, step: int, attempt: int = 1) -> Path:
    return machine.cell("hurt", cell) / "checkpoints" / f"step-{step:08}-attempt-{attempt}"


def test_part_by_part_and_then_everything(machine: Machine) -> None:
    started = machine.launch(3000, "hurt", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("hurt", 40)

    # the supervisor alone: its workers train on, and resume gives them a new one, for which they save and end
    machine.kill("hurt", "supervisor.py", "/west/node-0")
    seen = machine.until("hurt", lambda seen: seen["cells"][1]["nodes"][0]["state"] == "lost")
    assert (seen["state"], seen["detail"]) == (
        "degraded",
        "west/local: the supervisor was killed; the workers train on",
    )
    assert seen["hint"] == "islandctl resume hurt starts again what has ended"
    mended = machine.islandctl("resume", "hurt", "--detach")
    assert mended.returncode == 0, mended.stderr
    assert "west/local: its workers save, end and start again" in mended.stderr
    reached = max(steps_of(seen))
    machine.until("hurt", lambda seen: min(steps_of(seen)) > reached and seen["state"] in ("running", "waiting"))
    machine.until_joint("hurt", max(machine.joint_steps("hurt")) + 40)  # surely the work of the new life
    assert len(machine.metrics("hurt", "west", "start")) == 2
    steps = [line["step"] for line in machine.metrics("hurt", "west", "train")]
    assert steps == sorted(set(steps))  # no step was done twice

    # the relay with its supervisor, as after a restart of the controller
    kill([*machine.find("hurt", "supervisor.py", "/relay/node-0"), *machine.find("hurt", "-m islandctl.relay")])
    told = "the relay does not answer; standing still until it does, at most for late.relay_away: "
    seen = machine.until("hurt", lambda seen: seen["relay"]["state"] == "lost" and seen["detail"].startswith(told))
    assert seen["state"] == "degraded"
    assert seen["hint"] == "islandctl resume hurt starts again what has ended"
    mended = machine.islandctl("resume", "hurt", "--detach")
    assert mended.returncode == 0, mended.stderr
    assert "relay: starting again" in mended.stderr
    seen = machine.until("hurt", lambda seen: seen["relay"]["state"] == "answering" and min(steps_of(seen)) > 0)
    newest = max(machine.joint_steps("hurt"))
    machine.until_joint("hurt", newest + 20)

    # everything, and a disk that is not as it was left
    machine.kill_everything("hurt")
    newest = max(machine.joint_steps("hurt"))
    tensors = checkpoint(machine, "west", newest) / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    interrupted = checkpoint(machine, "east", 0).with_name(".tmp-step-00009999-attempt-1")
    interrupted.mkdir()
    (interrupted / "__0_0.distcp").write_bytes(b"half")

    machine.recipe(3000, training={"seed": 1}, exchange={"window": 21})
    refused = machine.islandctl("resume", "hurt")
    assert refused.returncode == 2
    assert "training.seed: 0 → 1; exchange.window: 20 → 21" in refused.stderr
    assert "put the old values back to resume" in refused.stderr
    machine.recipe(3000)

    resumed = machine.islandctl("resume", "hurt", "--detach")
    assert resumed.returncode == 0, resumed.stderr
    damage = f"step {newest}: west: step-{newest:08}-attempt-1: __0_0.distcp does not match its hash"
    assert f"passed over {damage}" in resumed.stderr
    assert f"attempt 2 begins at step {newest - 20}: the joint checkpoint of attempt 1" in resumed.stderr
    machine.until_joint("hurt", newest + 20)
    assert not interrupted.exists()
    stopped = machine.islandctl("stop", "hurt")
    assert stopped.returncode == 0, stopped.stdout
    assert "newest joint checkpoint: step " in stopped.stdout
    assert machine.processes("hurt") == {}

    # nothing on disk is whole: refused with the reasons, and --from 0 is the way out
    for cell in ("east", "west"):
        for file in (machine.cell("hurt", cell) / "checkpoints").glob("step-*/__0_0.distcp"):
            file.write_bytes(b"")
    refused = machine.islandctl("resume", "hurt")
    assert refused.returncode == 1
    error, hint = refused.stderr.splitlines()[-2:]
    assert error.startswith("error: no joint checkpoint can be used: step ")
    assert "__0_0.distcp has 0 bytes instead of " in error
    assert hint.endswith("start again from the beginning with --from 0")
    assert machine.processes("hurt") == {}
    again = machine.islandctl("resume", "hurt", "--from", "0", "--detach")
    assert again.returncode == 0, again.stderr
    assert "attempt 3 begins at step 0" in again.stderr
    assert again.stderr.count("passed over") == 1
    assert machine.islandctl("stop", "hurt", "--deadline", "0").returncode == 0
    assert machine.processes("hurt") == {}


def test_everything_killed_before_the_first_checkpoint(machine: Machine) -> None:
    machine.changes = {"checkpoint": {"every": 1000}}
    started = machine.launch(30, "hurt", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_trained("hurt", 3)
    before = {cell: machine.losses("hurt", cell) for cell in ("east", "west")}
    machine.kill_everything("hurt")
    resumed = machine.islandctl("resume", "hurt")
    assert resumed.returncode == 0, resumed.stderr
    assert "attempt 2 begins at step 0: no joint checkpoint yet" in resumed.stderr
    for cell, losses in before.items():
        after = machine.losses("hurt", cell)
        assert sorted(after) == list(range(1, 31))
        assert losses.items() <= after.items()
    assert machine.processes("hurt") == {}


def fill(path: Path) -> None:
    """Take all the space there is."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def test_a_full_disk_costs_checkpoints_not_the_training(machine: Machine, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small file system, which only root may do; run the slow tests as root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=230m", "tmpfs", str(disk)], check=True)
    try:
        machine.site("west", work_dir=str(disk))
        started = machine.launch(3000, "hurt", "--detach")
        assert started.returncode == 0, started.stderr
        machine.until_joint("hurt", 20)
        fill(disk / "filler")
        seen = machine.until("hurt", lambda seen: "no checkpoint at step" in seen["cells"][1]["detail"])
        assert seen["cells"][1]["detail"].endswith("cannot write the tensors: No space left on device")
        last = seen["joint_checkpoint"]["step"]
        reached = max(steps_of(seen))
        more = machine.until("hurt", lambda seen: min(steps_of(seen)) > reached)
        assert (more["joint_checkpoint"]["step"], more["cells"][1]["restarts"]) == (last, 0)
        assert checkpoint(machine, "west", last).is_dir()

        (disk / "filler").unlink()
        machine.until("hurt", lambda seen: seen["joint_checkpoint"]["step"] > last)
        machine.until("hurt", lambda seen: "no checkpoint" not in seen["cells"][1]["detail"])
        assert machine.islandctl("stop", "hurt").returncode == 0
        assert machine.processes("hurt") == {}
    finally:
        machine.kill_everything("hurt")
        subprocess.run(["umount", "-l", str(disk)], check=True)
