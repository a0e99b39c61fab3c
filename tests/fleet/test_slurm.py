"""A cell as a job of a real Slurm on this machine, with a small program in the workers' place."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import islandctl
from islandctl.config.site import SiteProfile
from islandctl.errors import PreflightError, RunError, UnreachableError
from islandctl.fleet.job import RestartPolicy, SupervisorJob, SupervisorState
from islandctl.fleet.local import LocalHost
from islandctl.fleet.scheduler import Seat, scheduler_of
from islandctl.fleet.slurm import SlurmJobs
from tests.slurm import Cluster, cluster
from tests.sshd import site_profile

CODE = str(Path(islandctl.__file__).parents[1])
WORKER = """
import json, os, signal, sys, time
folder, steps = sys.argv[1], int(sys.argv[2])
leads = os.environ["NODE"] == "0"
saved = os.path.join(folder, "saved")
step = int(open(saved).read()) if os.path.exists(saved) else 0
def tell(outcome, retry):
    if leads:
        with open(os.path.join(folder, "outcome.json.tmp"), "w") as file:
            json.dump({"outcome": outcome, "retry": retry, "reason": "at step %d" % step}, file)
        os.replace(os.path.join(folder, "outcome.json.tmp"), os.path.join(folder, "outcome.json"))
    while not os.path.exists(os.path.join(folder, "outcome.json")):
        time.sleep(0.02)  # ranks leave together
    sys.exit(0)
def stop(*_):
    if leads:
        with open(saved, "w") as file:
            file.write(str(step))
    tell("stopped", True)
signal.signal(signal.SIGTERM, stop)
print("begins at", step, os.environ.get("PET_MASTER_ADDR"), os.environ.get("PET_MASTER_PORT"), flush=True)
while step < steps or os.path.exists(os.path.join(folder, "hold")):
    time.sleep(0.02)
    step += 1
    if leads:
        with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
            file.write(json.dumps({"attempt": 1, "step": step}) + "\\n")
tell("finished", False)
"""


class Cell:
    """A cell of some nodes, and the scheduler that keeps it."""

    def __init__(self, root: Path, slurm: Cluster, name: str, *, nodes: int = 1, **asked: Any) -> None:
        self.slurm, self.mark = slurm, f"run-{name}.0123456789abcdef"
        self.folder = root / "work" / "runs" / self.mark / "west"
        self.folder.mkdir(parents=True)
        (self.folder / "worker.py").write_text(WORKER)
        self.host = LocalHost("west/login")
        profile = site_profile(
            "west", ["login"], {}, str(root / "work"), scheduler="slurm", slurm={"partition": "low", **asked},
            gpu={"type": "cpu", "count": nodes, "per_node": 1},
        )  # fmt: skip
        self.scheduler = scheduler_of(SiteProfile.model_validate(profile))
        self.seats = [
            Seat(self.host, sys.executable, CODE, "", str(self.folder / f"node-{index}"), 1) for index in range(nodes)
        ]

    def jobs(self, steps: int) -> list[SupervisorJob]:
        return [
            SupervisorJob(
                run="run",
                mark=self.mark,
                name=f"west/node-{index}",
                argv=(sys.executable, str(self.folder / "worker.py"), str(self.folder), str(steps)),
                cwd=str(self.folder),
                env={"NODE": str(index), "ISLANDCTL_RELAY_URL": "https://relay.example:1"},
                outcome=str(self.folder / "outcome.json"),
                progress=str(self.folder / "metrics.jsonl"),
                restart=RestartPolicy(limit=1, backoff_s=0.05),
                stop_timeout_s=10,
            )
            for index in range(len(self.seats))
        ]

    def start(self, steps: int) -> None:
        self.scheduler.start(self.seats, self.jobs(steps))

    def states(self) -> list[SupervisorState]:
        assert isinstance(self.scheduler, SlurmJobs)
        self.scheduler._told.clear()  # a person looks less often than a test
        return self.scheduler.states(self.seats)

    def until(self, good: Callable[[list[SupervisorState]], bool], deadline_s: float = 90.0) -> list[SupervisorState]:
        end = time.monotonic() + deadline_s
        while not good(seen := self.states()):
            said = self.slurm.run("squeue", "-a", "-t", "all", "-o", "%i %j %T %r")
            log = self.folder / "slurm.log"
            assert time.monotonic() < end, (seen, said, log.read_text() if log.exists() else "no log")
            time.sleep(0.1)
        return seen

    def stop(self) -> None:
        self.scheduler.stop(self.seats, 20.0)

    @property
    def job(self) -> str:
        return str(json.loads((self.folder / "slurm.json").read_text())["job"])

    def log(self, node: int = 0) -> list[str]:
        return (self.folder / f"node-{node}" / "logs" / f"node-{node}.log").read_text().splitlines()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "own") as made:
        yield made


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, slurm: Cluster) -> Cell:
    """A cell that runs into its time limit while other tests are at work."""
    cell = Cell(tmp_path_factory.mktemp("limited"), slurm, "limited", partition="apart", time="1 min", margin="55 s")
    (cell.folder / "hold").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
        cell.start(1)
    return cell


@pytest.fixture(autouse=True)
def found(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)


def running(seen: list[SupervisorState]) -> bool:
    return all(state.state == "running" for state in seen)


def pending(seen: list[SupervisorState]) -> bool:
    return all(state.state == "pending" for state in seen)


def ended(seen: list[SupervisorState]) -> bool:
    return all(state.state == "ended" for state in seen)


def test_two_nodes_meet_where_both_have_reached(tmp_path: Path, slurm: Cluster, limited: Cell) -> None:
    cell = Cell(tmp_path, slurm, "two", nodes=2)
    cell.start(20)
    with pytest.raises(RunError, match="is there already"):
        cell.start(20)
    last = cell.until(ended)
    assert [state.outcome for state in last] == ["finished", "finished"]
    (first,), (second,) = ([line.split()[3:] for line in cell.log(node)] for node in (0, 1))
    assert "None" not in first + second
    assert first[1] == second[1]
    assert cell.scheduler.left(cell.host, cell.mark, end=False) == []


def test_a_life_in_the_queue(tmp_path: Path, slurm: Cluster) -> None:
    """Held, stopped, killed, cancelled by hand; a folder that is not shared, an interpreter that is not there."""
    cell = Cell(tmp_path, slurm, "held", extra=["--hold"])
    assert cell.states()[0].state == "absent"
    cell.start(10)
    (held,) = cell.until(pending)
    assert held.reason == f"job {cell.job}: JobHeldUser: held; scontrol release {cell.job} lets it go"
    assert cell.scheduler.left(cell.host, cell.mark, end=False) == [f"Slurm's job {cell.job} (PENDING)"]
    cell.stop()
    (stopped,) = cell.states()
    assert (stopped.state, stopped.outcome, stopped.reason) == ("ended", "stopped", "it was still in Slurm's queue")
    assert cell.scheduler.left(cell.host, cell.mark, end=False) == []

    first = cell.job
    (cell.folder / "hold").touch()
    cell.start(10)
    assert cell.job != first
    slurm.run("scontrol", "release", cell.job)
    (state,) = cell.until(running)
    assert state.supervisor_pid is not None
    os.kill(state.supervisor_pid, signal.SIGKILL)  # the job has its tasks begin again, in the same nodes
    (back,) = cell.until(lambda seen: running(seen) and seen[0].supervisor_pid != state.supervisor_pid)
    assert back.restarts == state.restarts
    assert "slurm_node" in Path(f"/proc/{back.supervisor_pid}/cmdline").read_text()
    cell.until(lambda _: len(cell.log()) > 1)
    slurm.run("scancel", cell.job)
    (ended_by_hand,) = cell.until(ended)
    assert ended_by_hand.outcome == "stopped"
    assert "CANCELLED" in ended_by_hand.reason  # in our own record, or before that is there in Slurm's words
    cell.until(lambda _: cell.scheduler.left(cell.host, cell.mark, end=False) == [])
    assert (cell.folder / "saved").exists()

    running_one = Cell(tmp_path, slurm, "stop")
    (running_one.folder / "hold").touch()
    running_one.start(1)
    running_one.until(lambda seen: running(seen) and (running_one.folder / "metrics.jsonl").exists())
    running_one.stop()
    (asked,) = running_one.states()
    assert (asked.state, asked.outcome) == ("ended", "stopped")
    assert asked.reason.startswith("at step ")
    assert "COMPLETED" in slurm.run("scontrol", "show", "job", running_one.job)

    hasty = Cell(tmp_path, slurm, "hasty")  # stopped in the moment in which it begins
    (hasty.folder / "hold").touch()
    hasty.start(1)
    hasty.stop()
    assert hasty.states()[0].outcome == "stopped"
    assert hasty.scheduler.left(hasty.host, hasty.mark, end=False) == []

    apart = Cell(tmp_path, slurm, "apart", extra=["--hold"])
    apart.start(1)
    (apart.folder / "submission").unlink()
    slurm.run("scontrol", "release", apart.job)
    (unseen,) = apart.until(ended)
    assert unseen.outcome == "failed"
    assert "work_dir must lie on a file system that the login node and all nodes share" in unseen.reason

    lame = Cell(tmp_path, slurm, "lame")
    lame.seats = [Seat(lame.host, "/nowhere/python", CODE, "", lame.seats[0].folder, 1)]
    lame.start(1)
    (failed,) = lame.until(ended)
    assert failed.outcome == "failed"
    assert f"Slurm's job {lame.job} ended: FAILED, exit code 127: " in failed.reason
    assert "/nowhere/python" in failed.reason


def test_what_slurm_refuses_and_when_it_is_silent(tmp_path: Path, slurm: Cluster) -> None:
    nowhere = Cell(tmp_path, slurm, "nowhere", qos="gold", extra=["--partition=nowhere"])
    with pytest.raises(PreflightError, match=r"west/login: sbatch .*--partition=nowhere.*: .*invalid partition"):
        nowhere.start(1)
    assert nowhere.states()[0].state == "lost"
    nowhere.stop()
    assert nowhere.states()[0].outcome == "stopped"
    silent = Cell(tmp_path, slurm, "silent")
    profile = silent.scheduler._site.model_copy(  # type: ignore[attr-defined]
        update={"environment": silent.scheduler._site.environment.model_copy(update={"setup": ("PATH=/nowhere",)})}  # type: ignore[attr-defined]
    )
    deaf = scheduler_of(profile)
    with pytest.raises(UnreachableError, match="squeue: not found"):
        deaf.start(silent.seats, silent.jobs(1))
    silent.start(1)
    with pytest.raises(UnreachableError, match=r"Slurm does not answer: .*squeue: not found"):
        deaf.left(silent.host, silent.mark, end=True)
    assert len(silent.scheduler.left(silent.host, silent.mark, end=True)) == 0


def test_the_time_limit(limited: Cell) -> None:
    """Slurm looks at time limits every 30 s: meanwhile the other tests have run."""
    (state,) = limited.until(lambda seen: pending(seen) and "was interrupted" in seen[0].reason)
    assert state.reason.startswith(f"was interrupted (time limit); job {limited.job}: ")
    saved = int((limited.folder / "saved").read_text())
    assert saved > 0
    limited.stop()
    (stopped,) = limited.states()
    assert (stopped.outcome, stopped.reason) == ("stopped", f"at step {saved}")
