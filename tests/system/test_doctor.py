"""The doctor on real sites: two SSH servers, one in good order and one in bad; figures into their profiles."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.load import load_site
from tests.sshd import Sshd, namespaces_work, servers

from .local import Machine, ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WRONG_CLOCK = """#!/bin/sh
# Python on a machine whose clock is ten minutes ahead: what islandctl itself asks (-I -c CODE) sees it so
[ "$1" = -I ] || exec {python} "$@"
exec {python} -I -c "import time; real = time.time; time.time = lambda: real() + 600.0
$3"
"""


class Far:
    """A machine with two SSH sites."""

    def __init__(self, machine: Machine, east: Sshd, west: Sshd) -> None:
        self.machine, self.east, self.west = machine, east, west
        for name, server in (("east", east), ("west", west)):
            self.profile(name, server)

    def profile(self, name: str, server: Sshd, **changes: Any) -> Path:
        ssh = {"config": "/dev/null", "identity": str(server.identity), "known_hosts": str(server.known_hosts)}
        more = {
            "environment": {"python": sys.executable},
            "wan": {"up": "1 Mbit/s", "down": "1 Mbit/s", "rtt": "2 s"},
        }
        ssh |= {"connect_timeout": "15 s"}
        return self.machine.site(name, **{"scheduler": "ssh", "hosts": [server.host], "ssh": ssh, **more, **changes})

    def doctor(self, *options: str, code: int) -> dict[str, Any]:
        """``islandctl doctor --json``; nothing of it may be left afterwards."""
        sites = [part for name in ("east", "west") for part in ("--site", str(self.machine.root / f"{name}.yaml"))]
        done = self.machine.islandctl("doctor", str(self.machine.recipe(20)), *sites, "--json", *options)
        assert done.returncode == code, done.stderr + done.stdout
        assert list(self.machine.runs.iterdir()) == []
        report: dict[str, Any] = json.loads(done.stdout)
        return report


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    apart = namespaces_work()
    with servers(tmp_path / "servers") as start, ending(Machine(tmp_path)) as machine:
        yield Far(machine, start(namespace=apart), start(options=["AllowTcpForwarding no"]))


def levels(report: dict[str, Any], site: str) -> dict[str, str]:
    """The gravest level of every check of a site."""
    order = ["skipped", "ok", "warn", "unknown", "fail"]
    found: dict[str, str] = {}
    for row in report["rows"]:
        if row["site"] == site:
            found[row["check"]] = max(found.get(row["check"], "skipped"), row["level"], key=order.index)
    return found


def text(report: dict[str, Any], site: str, check: str) -> str:
    return "; ".join(row["text"] for row in report["rows"] if (row["site"], row["check"]) == (site, check))


def test_a_site_in_good_order_and_one_in_bad(far: Far) -> None:
    """No forwarding, a wrong clock, a folder that cannot be written, a port that is taken, a torch of its own."""
    python = far.west.folder / "python3"
    python.write_text(WRONG_CLOCK.format(python=sys.executable))
    python.chmod(0o755)
    far.profile("west", far.west, environment={"python": str(python)}, work_dir="/proc/islandctl")
    report = far.doctor(code=4)
    east, west = levels(report, "east"), levels(report, "west")
    bad = [row for row in report["rows"] if row["site"] == "east" and row["level"] in ("fail", "unknown")]
    assert [(row["check"], row["text"]) for row in bad] == []
    assert (east["login"], east["forwarding"], east["clock"], east["relay"]) == ("ok", "ok", "ok", "ok")
    assert east["software"] == "ok"
    assert {check for check, level in west.items() if level == "fail"} == {
        "forwarding",
        "clock",
        "disk-space",
        "relay",
    }
    assert "forwarding failed" in text(report, "west", "forwarding")
    assert "s ahead" in text(report, "west", "clock")
    assert "cannot write into /proc/islandctl" in text(report, "west", "disk-space")
    assert re.search(r"blocked: west/\S+ → relay: ", text(report, "west", "relay"))
    assert "forwarding failed" in text(report, "west", "relay")
    assert east["gpus"] == west["gpus"] == "skipped"
    assert text(report, "east", "gpus") == "no accelerator here (gpu.type: cpu)"
    assert [row["level"] for row in report["rows"] if row["check"] == "agreement"] == ["ok"]
    assert all(row["hint"] for row in report["rows"] if row["level"] in ("fail", "warn", "unknown"))

    # a host that is away is one row, and its site's others say so; a taken port is told with its holder
    far.west.drop()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        far.machine.changes = {"relay": {"port": port}}
        away = far.doctor("--only", "clock", "--only", "relay", code=4)
    assert levels(away, "west") == {"login": "unknown", "clock": "skipped", "relay": "skipped"}
    (row,) = [row for row in away["rows"] if row["check"] == "relay" and row["level"] == "fail"]
    assert re.search(rf"relay\.port {port}: pid \d+ \(.*python.*\) holds it", row["text"])


def test_figures_into_the_profiles(far: Far) -> None:
    machine = far.machine
    west = machine.site("west", wan={"up": "1 Mbit/s", "down": "1 Mbit/s", "rtt": "2 s"})
    before = {name: (machine.root / f"{name}.yaml").read_text() for name in ("east", "west")}
    machine.changes = {"relay": {"emulate": {"bandwidth": "80 Mbit/s", "rtt": "40 ms"}}}
    checks = [part for name in ("relay", "wan", "disk-space", "disk-rate", "storage") for part in ("--only", name)]
    report = far.doctor("--tier", "standard", "--seconds", "1", "--write-profile", *checks, code=0)
    for name in ("east", "west"):
        measured = report["measured"][name]
        assert {"wan.up", "wan.down", "wan.rtt", "storage.write", "storage.read", "storage.free"} == set(measured)
        assert 8e6 < measured["wan.down"] < 160e6, measured
        assert measured["wan.rtt"] >= 0.04
        site = load_site(machine.root / f"{name}.yaml").value
        assert site.wan.up == pytest.approx(measured["wan.up"], rel=0.006)
        assert site.wan.rtt == pytest.approx(measured["wan.rtt"], rel=0.006)
        assert site.storage.free == pytest.approx(measured["storage.free"], rel=0.006)
        old, new = json.loads(before[name]), json.loads((machine.root / f"{name}.yaml").read_text())
        assert {key: value for key, value in old.items() if key != "wan"} == {
            key: value for key, value in new.items() if key not in ("wan", "storage", "examined")
        }
    assert {one["key"] for one in report["written"] if one["profile"] == str(west)} == set(measured)


def test_one_that_is_killed_is_cleared_up_by_stop(tmp_path: Path) -> None:
    with ending(Machine(tmp_path)) as machine:
        begun = machine.begin(
            "doctor", str(machine.recipe(20)), *far_sites(machine), "--only", "wan", "--seconds", "60"
        )
        assert begun.stderr is not None
        assert any("measuring all links" in line for line in begun.stderr)
        begun.kill()
        (folder,) = machine.runs.iterdir()
        run = folder.name
        assert run.startswith("doctor-")
        assert machine.islandctl("remove", run).returncode == 2
        assert machine.islandctl("stop", run).returncode == 0
        assert machine.processes(run) == {}
        assert machine.islandctl("remove", run).returncode == 0


def far_sites(machine: Machine) -> list[str]:
    return [part for name in ("east", "west") for part in ("--site", str(machine.root / f"{name}.yaml"))]
