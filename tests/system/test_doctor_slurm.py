"""The doctor on a site with a real Slurm behind a real sshd: its nodes in a job, and never a job left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disk import needs_mount
from tests.slurm import Cluster, cluster
from tests.sshd import Sshd, servers

from .local import Machine, ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Clinic:
    """A machine whose site ``west`` is a Slurm cluster of two nodes, and ``east`` this machine."""

    def __init__(self, machine: Machine, slurm: Cluster, login: Sshd) -> None:
        self.machine, self.slurm, self.login = machine, slurm, login
        self.work = machine.root / "work dir" / "west"
        ssh = {"identity": str(login.identity), "known_hosts": str(login.known_hosts), "config": "/dev/null"}
        machine.site(
            "west",
            scheduler="slurm",
            hosts=[login.host],
            ssh=ssh,
            gpu={"count": 2},
            environment={"python": sys.executable},
            slurm={"partition": "low"},
        )

    def words(self, *options: str) -> list[str]:
        sites = [part for name in ("east", "west") for part in ("--site", str(self.machine.root / f"{name}.yaml"))]
        return ["doctor", str(self.machine.recipe(20)), *sites, *options]

    def doctor(self, *options: str, code: int) -> dict[str, Any]:
        done = self.machine.islandctl(*self.words("--json", *options))
        assert done.returncode == code, done.stderr + done.stdout
        self.clean()
        report: dict[str, Any] = json.loads(done.stdout)
        return {**report, "said": done.stderr}

    def clean(self) -> None:
        """Nothing is left: no record, no job, no file."""
        assert list(self.machine.runs.iterdir()) == []
        assert "doctor-" not in self.slurm.run("squeue", "-h", "-o", "%j")
        assert list((self.work / "runs").iterdir()) == []

    def begin(self, *options: str) -> subprocess.Popen[str]:
        """Begun, and as far as a job that waits."""
        begun = self.machine.begin(*self.words("--tier", "standard", "--only", "clock", *options))
        assert begun.stderr is not None
        assert any("waits for nodes to become free" in line for line in begun.stderr)
        assert "doctor-" in self.slurm.run("squeue", "-h", "-o", "%j")
        return begun


def only(*checks: str) -> list[str]:
    return [part for check in checks for part in ("--only", check)]


def rows(report: dict[str, Any], check: str) -> list[tuple[str, str]]:
    """Place and level of a check's rows on the Slurm site."""
    found = [one for one in report["rows"] if (one["site"], one["check"]) == ("west", check)]
    return sorted((one["place"].rpartition("@")[2].partition(":")[0], one["level"]) for one in found)


def text(report: dict[str, Any], check: str, level: str) -> str:
    """What is said of the Slurm site."""
    asked = ("west", check, level)
    return next(one["text"] for one in report["rows"] if (one["site"], one["check"], one["level"]) == asked)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "own") as made:
        yield made


@pytest.fixture
def clinic(tmp_path: Path, slurm: Cluster) -> Iterator[Clinic]:
    with servers(tmp_path / "servers") as start, ending(Machine(tmp_path)) as machine:
        yield Clinic(machine, slurm, start(variables=slurm.env))


def test_nodes_are_measured_in_a_job(clinic: Clinic) -> None:
    """As plain hosts are: disks, collectives over the cell, the way to the relay behind the login node."""
    of_cells = ("one-folder", "rendezvous", "cell-all-reduce")
    checks = only("slurm", "clock", "memory", "disk-rate", *of_cells, "relay", "storage")
    report = clinic.doctor("--tier", "standard", "--seconds", "1", *checks, code=0)
    assert re.search(r"west: Slurm has the doctor's job \d+: 2 nodes for at most \d+ min", report["said"])
    assert rows(report, "clock") == [("127.0.0.1", "ok"), ("west/n1", "ok"), ("west/n2", "ok")]
    assert [place for place, _ in rows(report, "disk-rate")] == ["west/n1", "west/n2"]
    assert [place for place, _ in rows(report, "memory")] == ["west/n1", "west/n2"]
    for check in of_cells:
        assert rows(report, check) == [("cell west", "ok")]
    (way,) = [one for one in report["rows"] if (one["site"], one["check"]) == ("west", "relay")]
    assert way["text"].startswith("2 nodes, round trip")
    assert {"storage.write", "wan.rtt"} <= set(report["measured"]["west"])

    quick = clinic.doctor(code=0)
    assert "doctor's job" not in quick["said"]
    assert [level for _, level in rows(quick, "slurm")] == ["ok", "ok"]
    assert text(quick, "memory", "skipped") == "a login node; --tier standard asks the site's nodes, in a job"
    assert rows(quick, "rendezvous") == [("cell west", "skipped")]


@needs_mount
def test_a_broken_node_is_found_by_its_name(clinic: Clinic) -> None:
    """Its work folder is read-only. Another one is drained, and no job is submitted for what cannot be had."""
    clinic.work.mkdir(parents=True)
    lock = f"mount --bind '{clinic.work}' '{clinic.work}' && mount -o remount,ro,bind '{clinic.work}'"
    clinic.slurm.restart("n2", "unshare", "--mount", "sh", "-c", f'{lock} && exec "$@"', "sh")
    try:
        checks = only("clock", "disk-space", "rendezvous", "relay")
        report = clinic.doctor("--tier", "standard", *checks, code=4)
    finally:
        clinic.slurm.restart("n2")
    assert [one["place"] for one in report["rows"] if one["level"] in ("fail", "unknown")] == ["west/n2"]
    assert re.fullmatch(r"cannot write into .*: Read-only file system", text(report, "login", "fail"))
    assert rows(report, "disk-space")[1:] == [("west/n1", "ok"), ("west/n2", "skipped")]
    assert rows(report, "rendezvous") == [("cell west", "skipped")]
    assert rows(report, "relay")[0][1] in ("ok", "warn")  # from the other node

    clinic.slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=bad GPU")
    try:
        drained = clinic.doctor("--tier", "standard", *only("slurm", "memory"), code=4)
    finally:
        clinic.slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert text(drained, "slurm", "fail") == "low: 1 of 2 nodes can be used, and the run needs 2"
    assert text(drained, "slurm", "warn").startswith("drained: bad GPU (root")
    assert ("west/n2", "warn") in rows(drained, "slurm")
    assert "doctor's job" not in drained["said"]
    assert [level for _, level in rows(drained, "memory")] == ["skipped"]


def test_no_job_is_left_behind(clinic: Clinic) -> None:
    """Its time in the queue is up; Ctrl-C; and kill -9, after which stop clears up."""
    blocker = clinic.slurm.occupy(900)
    report = clinic.doctor("--tier", "standard", "--wait", "4 s", *only("clock", "gpus"), code=0)
    assert rows(report, "gpus") == [("west/nodes", "skipped")]
    why = text(report, "gpus", "skipped")
    assert re.match(r"no nodes within 4 s \(--wait gives the job more\): job \d+: Resources: waits for nodes", why)
    assert ("west/nodes", "skipped") in rows(report, "clock")

    begun = clinic.begin()
    begun.send_signal(signal.SIGINT)
    assert begun.wait(timeout=90) == 130
    clinic.clean()

    begun = clinic.begin()
    begun.kill()
    begun.wait(timeout=60)
    (folder,) = clinic.machine.runs.iterdir()
    assert clinic.machine.islandctl("remove", folder.name).returncode == 2  # its job is in the queue
    stopped = clinic.machine.islandctl("stop", folder.name)
    assert stopped.returncode == 0, stopped.stderr + stopped.stdout
    assert "doctor-" not in clinic.slurm.run("squeue", "-h", "-o", "%j")
    removed = clinic.machine.islandctl("remove", folder.name)
    assert "/visit" in removed.stdout
    clinic.clean()
    clinic.slurm.run("scancel", blocker)
