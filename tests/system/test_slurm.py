"""A site with a real Slurm behind a real sshd: launch, wait in the queue, be preempted, go on, stop, remove."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import Cluster, cluster
from tests.sshd import Sshd, servers

from .local import Machine, ending, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Site:
    """A machine whose site ``west`` is a Slurm cluster of two nodes, and ``east`` this machine."""

    def __init__(self, machine: Machine, slurm: Cluster, login: Sshd) -> None:
        self.machine, self.slurm, self.login = machine, slurm, login
        self.profile()

    def profile(self, *, nodes: int = 2, **asked: Any) -> None:
        self.machine.site(
            "west",
            scheduler="slurm",
            hosts=[self.login.host],
            ssh={
                "identity": str(self.login.identity),
                "known_hosts": str(self.login.known_hosts),
                "config": "/dev/null",
            },
            gpu={"count": nodes},
            environment={"python": sys.executable},
            slurm={"partition": "low", **asked},
        )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "own") as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, slurm: Cluster) -> Iterator[Site]:
    with servers(tmp_path / "servers") as start, ending(Machine(tmp_path)) as machine:
        yield Site(machine, slurm, start(variables=slurm.env))


def test_a_run(site: Site) -> None:
    machine = site.machine
    done = machine.launch(40, "queued")
    assert done.returncode == 0, done.stderr + done.stdout
    assert steps_of(machine.status("queued")) == [40, 40]
