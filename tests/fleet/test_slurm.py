"""A cell as a job of a real Slurm on this machine, with a small program in the workers' place."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from islandctl.errors import PreflightError, RunError, UnreachableError
from islandctl.fleet.checks.base import Node, Verdict
from islandctl.fleet.checks.slurm import SlurmJob
from islandctl.fleet.scheduler import Seat, scheduler_of
from tests.slurm import Cluster, cluster
from tests.slurm_cell import CODE, Cell, ended, pending, running


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "own") as made:
        yield made


@pytest.fixture(autouse=True)
def found(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)


def test_two_nodes_meet_where_both_have_reached(tmp_path: Path, slurm: Cluster) -> None:
    cell = Cell(tmp_path, slurm, "two", nodes=2)
    cell.start(20)
    with pytest.raises(RunError, match="is there already"):
        cell.start(20)
    last = cell.until(ended)
    assert [state.outcome for state in last] == ["finished", "finished"]
    assert {state.node for state in last} == {"n1", "n2"}
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
    assert held.node == ""
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
    assert back.node == state.node != ""
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


def test_a_job_that_slurm_cannot_end_is_waited_for_once(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(tmp_path, slurm, "stuck", partition="apart")
    (cell.folder / "hold").touch()
    cell.start(1)
    cell.until(lambda seen: running(seen) and (cell.folder / "metrics.jsonl").exists())
    (daemon,) = (one for one in slurm._daemons if one.args[-1] == "n3")  # type: ignore[index]
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr("islandctl.fleet.slurm.GONE_S", 1.0)
        with pytest.raises(UnreachableError, match=rf"job {cell.job} on n3 is COMPLETING still, 1 s after scancel"):
            cell.stop()
        monkeypatch.setattr("islandctl.fleet.slurm.GONE_S", 3600.0)
        assert cell.scheduler.left(cell.host, cell.mark, end=True) == [f"Slurm's job {cell.job} (COMPLETING) n3"]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    cell.until(lambda _: cell.scheduler.left(cell.host, cell.mark, end=False) == [])


def doctor_asks(cell: Cell) -> list[Verdict]:
    site = cell.scheduler._site  # type: ignore[attr-defined]
    verdicts = SlurmJob().look(Node(site=site, name="login", ranks=1, open=lambda: cell.host, kind="login"))
    assert not isinstance(verdicts, Verdict)
    return list(verdicts)


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
    with pytest.raises(PreflightError, match=r"Slurm's commands are not there: .*sbatch: not found"):
        deaf.present(silent.host)
    (refused,) = doctor_asks(nowhere)
    assert refused.level == "fail"
    assert "invalid partition" in refused.text
    nodes, fine = doctor_asks(silent)
    assert (nodes.level, nodes.text) == ("ok", "low: 2 of 2 nodes can be used")
    assert fine.level == "ok"
    assert re.fullmatch(r"slurm\S* \d+\.\S+: Job \d+ to start at .*", fine.text)
    with pytest.raises(UnreachableError, match="squeue: not found"):
        deaf.start(silent.seats, silent.jobs(1))
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=bad GPU | 3")
    (drained,) = doctor_asks(silent)[:-1]
    slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert (drained.level, drained.place) == ("warn", "west/n2")
    assert drained.text.startswith("drained: bad GPU | 3 (root")
    silent.start(1)
    with pytest.raises(UnreachableError, match=r"Slurm does not answer: .*squeue: not found"):
        deaf.left(silent.host, silent.mark, end=True)
    assert len(silent.scheduler.left(silent.host, silent.mark, end=True)) == 0
