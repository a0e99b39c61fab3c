"""A site's disk fills up, and its workers die on it: the run goes on, and the status tells what is so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disk import fill, mounted, needs_mount

from .local import Machine, ending, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_mount]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with mounted(tmp_path / "disk", 220 << 20), ending(Machine(tmp_path)) as made:
        yield made


def test_the_status_is_right_on_a_full_disk_and_after_a_restart_there(machine: Machine) -> None:
    disk = machine.root / "disk"
    machine.site("west", work_dir=str(disk))
    started = machine.launch(3000, "full", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("full", 20)
    filler = fill(disk)

    seen = machine.until("full", lambda seen: seen["state"] == "degraded")
    assert seen["detail"].startswith("west: no checkpoint at step ")
    assert "No space left" in seen["detail"]
    assert seen["hint"] == f"free space on west/local below {disk}; the next one is tried as planned"

    failed_at = int(seen["detail"].split()[5].rstrip(":"))
    kill(machine.workers("full", "west"))
    machine.until("full", lambda seen: seen["cells"][1]["restarts"] == 1)
    seen = machine.until("full", lambda seen: seen["cells"][1]["state"] in ("training", "waiting"))
    assert seen["cells"][1]["last_end"]
    assert seen["cells"][1]["detail"].startswith("no checkpoint at step ")  # told before the next one fails as well
    assert seen["state"] == "degraded"

    filler.unlink()
    machine.until_joint("full", failed_at)
    machine.until("full", lambda seen: seen["state"] in ("running", "waiting"))

    # what starts on a full disk leaves nothing behind that would keep the next life from starting
    fill(disk)
    kill(machine.workers("full", "west"))
    machine.until("full", lambda seen: seen["cells"][1]["restarts"] == 2)
    machine.until("full", lambda seen: seen["cells"][1]["state"] in ("training", "waiting"))
    stopped = machine.islandctl("stop", "full")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not list((disk / "code").rglob("*.pyc"))
