"""A site with a real Slurm behind a real sshd: launch, wait in the queue, be preempted, go on, stop, remove."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import Cluster, cluster
from tests.slurm_cell import Cell, ended
from tests.sshd import Sshd, servers

from .local import Machine, ending, steps_of
from .tensors import model_hashes

STEPS = 40
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
def limited(tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A cell beside, that runs into its time limit meanwhile: Slurm looks at limits every 30 s."""
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    cell = Cell(tmp_path / "limited", slurm, "limited", partition="apart", time="1 min", margin="55 s")
    (cell.folder / "hold").touch()
    cell.start(1)
    return cell


@pytest.fixture
def site(tmp_path: Path, slurm: Cluster) -> Iterator[Site]:
    # the round's deadline is far: a cell that is late in it would make the other one skip it
    recipe = {"exchange": {"late": {"deadline": "5 min"}}}
    with servers(tmp_path / "servers") as start, ending(Machine(tmp_path, recipe)) as machine:
        yield Site(machine, slurm, start(variables=slurm.env))


def test_a_run_waits_in_the_queue_is_preempted_and_goes_on(site: Site, limited: Cell) -> None:
    """Two sites, one of them a cell on two nodes of Slurm. No step is trained twice, and both cells end equal."""
    machine, slurm = site.machine, site.slurm
    blocker = slurm.occupy(600)
    started = machine.launch(STEPS, "queued", "--detach")
    assert started.returncode == 0, started.stderr
    assert "goes to the relay through a tunnel" in started.stderr
    waits = machine.until("queued", lambda seen: "Resources" in seen["cells"][1]["detail"])
    assert waits["cells"][1]["state"] == "pending"
    assert "job " in waits["cells"][1]["detail"]
    assert "waits for nodes to become free" in waits["cells"][1]["detail"]
    assert waits["state"] in ("pending", "running", "waiting")
    assert "west is pending: job " in waits["detail"]

    slurm.run("scancel", blocker)
    machine.until_trained("queued", 5)
    nodes = machine.status("queued")["cells"][1]["nodes"]
    assert {node["label"] for node in nodes} == {"west/n1", "west/n2"}
    slurm.occupy(1)
    again = machine.until("queued", lambda seen: "was interrupted" in seen["cells"][1]["detail"])
    assert again["cells"][1]["state"] == "pending"
    number = again["cells"][1]["detail"].partition("job ")[2].partition(":")[0].partition(" ")[0]
    slurm.run("scontrol", "update", f"jobid={number}", "StartTime=now")  # else Slurm waits until a credential is old

    done = machine.islandctl("status", "queued", "--watch")
    assert "queued  finished" in done.stdout, done.stdout + done.stderr
    assert steps_of(machine.status("queued")) == [STEPS, STEPS]
    trained = [line["step"] for line in machine.metrics("queued", "west", "train")]
    assert trained == list(range(1, STEPS + 1))
    assert [line["num_ranks"] for line in machine.metrics("queued", "west", "start")] == [2, 2]
    assert all(len(hashes) == 1 for hashes in machine.packets("queued").values())
    east, west = (
        machine.cell("queued", name) / f"checkpoints/step-{STEPS:08}-attempt-1" for name in ("east", "west")
    )
    assert model_hashes(east) == model_hashes(west)

    stopped = machine.islandctl("stop", "queued")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert f"nothing of queued is left on this machine, west/{site.login.host}" in stopped.stdout
    assert machine.processes("queued") == {}
    removed = machine.islandctl("remove", "queued", "--checkpoints")
    assert removed.returncode == 0, removed.stderr

    def interrupted() -> str:
        told = json.loads((limited.folder / "slurm.json").read_text())
        return str(told.get("interrupted", {}).get("why", ""))

    limited.until(lambda _: interrupted() != "")
    assert interrupted() == "time limit"
    (limited.folder / "hold").unlink()
    (through,) = limited.until(ended)
    assert through.outcome == "finished"
    begun = [int(line.split()[2]) for line in limited.log() if line.startswith("begins")]
    assert begun[0] == 0 < begun[1]
