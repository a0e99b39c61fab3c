"""Stop and remove of runs on this machine: real files, real processes, supervisors' words as they leave them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.paths import RunFolder
from islandctl.errors import UnreachableError, UsageError
from islandctl.relay.inprocess import InProcessRelay
from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.runs import record as records
from islandctl.runs import stop as stopping
from islandctl.runs.record import CellRecord, KeptRecord, RunRecord
from islandctl.runs.relay import make_secrets
from islandctl.runs.remove import Removal, remove
from islandctl.runs.stop import Standstill, StopReport, has_trained, not_waited_for, stop, stop_unreadable

from . import builders as make
from .test_search import far_plan, far_record


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))


def run_of(tmp_path: Path, outcomes: dict[str, str], **changes: Any) -> RunRecord:
    """A run whose cells have ended so, with their folders as workers leave them."""
    made = records.create(make.plan(), "demo", launcher_pid=0)
    make_secrets(made, make.plan())

    def here(cell: CellRecord) -> CellRecord:
        (node,) = cell.nodes
        folder = tmp_path / cell.name / "runs" / made.mark / cell.name
        (folder / "node-0").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("{}\n")
        (folder / "node-0" / "state.json").write_text('{"state": "ended", "supervisor_pid": 1, "boot_id": "old"}')
        ended = {"outcome": outcomes[cell.name], "reason": "exit code 3", "restarts": 0}
        (folder / "node-0" / "exit.json").write_text(json.dumps(ended))
        placed = {
            "work_dir": str(tmp_path / cell.name),
            "cell_folder": str(folder),
            "folder": str(folder / "node-0"),
            "relay_url": "https://127.0.0.1:1",
        }
        return cell.model_copy(update={"nodes": (node.model_copy(update=placed),)})

    cells = tuple(map(here, make.record().cells))
    return records.change(made, cells=cells, relay_url="https://127.0.0.1:1", **{"phase": "launched", **changes})


def stopped(record: RunRecord) -> StopReport:
    return stop(record, make.plan(), lambda _: None, deadline_s=0.0)


def removed(*, checkpoints: bool = False, forget: bool = False) -> Removal:
    return remove("demo", lambda _: None, checkpoints=checkpoints, forget=forget)


@pytest.fixture
def process() -> Iterator[Any]:
    """Begins a process that carries a run's mark."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(mark: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "ISLANDCTL_RUN": mark, "ISLANDCTL_JOB": "east/node-0"}
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"],
            env=env,
            stdout=subprocess.PIPE,
        )
        begun.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield begin
    for child in begun:
        child.kill()
        child.communicate()


def test_a_stop_does_not_change_how_a_run_came_out(tmp_path: Path) -> None:
    report = stopped(run_of(tmp_path, {"east": "finished", "west": "finished"}))
    assert (report.finished, report.exit_code) == (True, 0)
    assert report.lines == ["nothing of demo is left on this machine", "demo has finished"]
    after = records.load("demo")
    assert (after.phase, after.reason) == ("stopped", "finished")

    assert stopped(after).finished
    assert records.load("demo").reason == "finished"


def test_a_stop_of_a_failed_run_keeps_its_reason(tmp_path: Path) -> None:
    report = stopped(run_of(tmp_path, {"east": "failed", "west": "stopped"}))
    assert not report.finished
    assert records.load("demo").reason == "failed: exit code 3"


def test_a_cell_that_fails_at_its_last_step_during_a_stop_makes_the_run_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` reads the nodes' files and said so; the list of runs said that it was stopped."""
    made = run_of(tmp_path, {"east": "stopped", "west": "failed"})
    exits = Path(made.cells[1].nodes[0].folder) / "exit.json"
    said = exits.read_text()
    exits.unlink()
    monkeypatch.setattr(stopping, "_together", lambda *_: exits.write_text(said))
    stopped(made)
    after = records.load("demo")
    assert (after.phase, after.reason, after.last_known) == ("stopped", "failed: exit code 3", "failed")


def test_a_finished_run_is_not_told_to_resume() -> None:
    lines = StopReport(run="demo", finished=True, checkpoint=40).lines
    assert lines == ["demo has finished", "newest joint checkpoint: step 40"]
    assert StopReport(run="demo", checkpoint=40).lines == ["newest joint checkpoint: step 40; islandctl resume demo"]


def test_a_stop_after_the_budget_keeps_the_reason_and_hints_at_a_higher_one(tmp_path: Path) -> None:
    made = run_of(tmp_path, {"east": "stopped", "west": "stopped"})
    for cell in made.cells:
        path = Path(cell.nodes[0].folder) / "exit.json"
        path.write_text(json.dumps({"outcome": "stopped", "reason": "stopped by budget: 2 h of 2 h used"}))
    report = stopped(made)
    assert report.spent
    assert records.load("demo").reason == "stopped by budget: 2 h of 2 h used"
    told = report.model_copy(update={"checkpoint": 40}).lines[-1]
    assert told == "newest joint checkpoint: step 40; islandctl resume demo --budget '…'"


def test_a_run_in_which_nobody_has_trained_is_told_from_one_that_was_not_heard_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the relay was started anew, and has heard of nobody yet."""
    monkeypatch.setattr("islandctl.runs.stop.HEARTBEAT_S", 0.3)
    office = InProcessRelay("demo", "c", make.CELLS, 1)
    beat = Heartbeat(
        attempt=1, cell=1, state="starting", step=0, steps=9, tokens=0, tokens_per_s=0.0, held_out_hash="", life="1"
    )
    assert not has_trained(office, 1)
    office.transport(1).heartbeat(beat)
    assert not has_trained(office, 1)
    office.transport(1).heartbeat(beat.model_copy(update={"step": 3}))
    assert not has_trained(office, 2)

    class Slow:
        """What it hears next comes after the first question."""

        def __init__(self) -> None:
            self.office = InProcessRelay("demo", "c", make.CELLS, 1)

        def status(self) -> RelayStatus:
            told = self.office.status()
            self.office.transport(0).heartbeat(beat.model_copy(update={"cell": 0, "step": 1}))
            return told

    assert has_trained(Slow(), 1)


def test_a_second_stop_finds_the_newest_checkpoint_in_the_relays_file(tmp_path: Path) -> None:
    folder = tmp_path / "relay"
    folder.mkdir()
    office = InProcessRelay("demo", "c", make.CELLS, 1)
    for cell in (0, 1):
        office.transport(cell).register_checkpoint(40, f"m{cell}", [0], 1)
    entries = office.transport(0).entries(-1, 0.0)
    (folder / "ledger.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    relay = KeptRecord(name="relay", python="", code="", supervisor="", folder=str(folder / "node-0"))
    made = run_of(tmp_path, {"east": "stopped", "west": "stopped"}, relay=relay, phase="stopped")
    assert stopped(made).checkpoint == 40


def test_remove_keeps_the_checkpoints_unless_told(tmp_path: Path) -> None:
    record = run_of(tmp_path, {"east": "finished", "west": "finished"}, phase="stopped", reason="finished")
    east, west = (Path(cell.nodes[0].cell_folder) for cell in record.cells)
    (east / "checkpoints" / "step-00000040-attempt-1").mkdir(parents=True)
    report = removed()
    assert report.lines == [
        f"removed: east/local: {east}",
        f"removed: west/local: {west}",
        f"removed: this machine: {RunFolder.of('demo').root}",
        f"kept: east/local: {east / 'checkpoints'}",
    ]
    assert [path.name for path in east.iterdir()] == ["checkpoints"]
    assert os.listdir(tmp_path / "west" / "runs") == []
    assert os.listdir(tmp_path / "home" / "runs") == []
    with pytest.raises(UsageError, match="no run called demo"):
        removed()
    again = records.create(make.plan(), "demo", launcher_pid=0)
    assert again.mark != record.mark


def test_remove_takes_the_checkpoints_when_told(tmp_path: Path) -> None:
    record = run_of(tmp_path, {"east": "finished", "west": "finished"}, phase="stopped")
    east = Path(record.cells[0].nodes[0].cell_folder)
    (east / "checkpoints" / "step-00000040-attempt-1").mkdir(parents=True)
    assert removed(checkpoints=True).kept == ()
    assert os.listdir(tmp_path / "east" / "runs") == []


def test_remove_refuses_while_anything_lives(tmp_path: Path, process: Any) -> None:
    record = run_of(tmp_path, {"east": "stopped", "west": "stopped"})
    process(record.mark)
    with pytest.raises(UsageError, match=r"demo still runs: this machine: process \d+ \(east/node-0\)") as caught:
        removed(forget=True)
    assert caught.value.hint == "islandctl stop demo ends it first"
    assert records.load("demo") == record


def test_a_host_that_does_not_answer_keeps_the_record_until_it_is_forgotten() -> None:
    made = records.create(far_plan(), "demo", launcher_pid=0)
    lost = far_record(reached=True)
    cells = tuple(
        cell.model_copy(update={"nodes": (cell.nodes[0].model_copy(update={"host": f"{cell.name}.invalid"}),)})
        for cell in lost.cells
    )
    plan = far_plan().model_dump(mode="json")
    plan = json.loads(json.dumps(plan).replace('"east-1"', '"east.invalid"').replace('"west-1"', '"west.invalid"'))
    RunFolder.of("demo").plan.write_text(json.dumps(plan))
    relay = lost.relay and lost.relay.model_copy(update={"host": "hub.invalid", "folder": "/w/runs/m/relay/node-0"})
    records.change(made, phase="stopping", cells=cells, relay=relay, relay_url="https://127.0.0.1:1")
    with pytest.raises(UnreachableError, match="nothing proves that demo has ended everywhere: ") as caught:
        removed()
    assert f"islandctl remove demo --forget, and see there that no process has ISLANDCTL_RUN={made.mark}" in str(
        caught.value.hint
    )
    assert caught.value.message.count("east/east.invalid: ") == 1
    report = removed(forget=True)
    assert [line.partition(": ")[0] for line in report.lines] == ["not proven"] * 3 + ["removed"] + ["kept"] * 3
    assert report.kept[-1] == "relay/hub.invalid: /w/runs/m/relay"
    assert "demo" not in records.names()


def test_a_damaged_record_hinders_neither_stop_nor_remove(tmp_path: Path, process: Any) -> None:
    record = run_of(tmp_path, {"east": "stopped", "west": "stopped"})
    child = process(record.mark)
    path = RunFolder.of("demo").record
    path.write_text(path.read_text()[:200])
    with pytest.raises(UsageError, match=r"run\.json") as caught:
        records.load("demo")
    assert "islandctl stop demo" in caught.value.hint
    with pytest.raises(UsageError, match="still runs"):
        removed()

    said: list[str] = []
    report = stop_unreadable("demo", caught.value, said.append)
    assert (report.exit_code, report.hosts) == (0, ("this machine",))
    assert child.wait() != 0
    assert "run.json" in said[0]

    assert [line.partition(": ")[0] for line in removed().lines] == ["removed", "kept", "kept"]


def test_a_folder_without_a_record_can_be_removed() -> None:
    RunFolder.of("demo").root.mkdir(parents=True)
    with pytest.raises(UsageError, match="has no record") as caught:
        records.load("demo")
    assert "islandctl remove demo" in caught.value.hint
    with pytest.raises(UsageError, match="has no record"):
        stop_unreadable("demo", caught.value, lambda _: None)
    removed()
    assert records.names() == []


def test_a_run_whose_plan_is_lost_can_only_be_forgotten(tmp_path: Path) -> None:
    run_of(tmp_path, {"east": "stopped", "west": "stopped"})
    RunFolder.of("demo").plan.unlink()
    with pytest.raises(UsageError, match="the run's plan is missing") as caught:
        removed()
    assert caught.value.hint.endswith("islandctl remove demo --forget")
    (unknown,) = removed(forget=True).unknown
    assert "all hosts but this machine" in unknown
    assert records.names() == []


def test_whose_end_is_waited_for() -> None:
    assert not_waited_for(make.running(restarts=3), 3) == ""
    assert not_waited_for(make.running(restarts=4), 3) == ""  # somebody killed it as it saved: it does so again
    again = make.running(state="backoff", restarts=5, last="exit code 1")
    assert not_waited_for(again, 3) == "dies whenever it is started (exit code 1); its supervisor ends it now"
    assert not_waited_for(make.ended("stopped"), 0) == "ended"
    assert "not known" in not_waited_for(None, 0)  # nothing is concluded from silence


def test_a_cell_that_does_not_run_is_not_waited_for_by_those_that_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs would be the round's deadline, which can be beyond the stop's."""
    monkeypatch.setattr("islandctl.runs.stop.STANDS_S", 0.2)
    office = InProcessRelay("demo", "c", make.CELLS, 1)
    beat = Heartbeat(
        attempt=1, cell=0, state="waiting", step=3, steps=9, tokens=0, tokens_per_s=0.0, held_out_hash="", life="1"
    )
    told = office.status().model_copy(update={"rounds_open": 1})

    class Says:
        def __init__(self) -> None:
            self.beats, self.open = {0: beat}, 1

        def status(self) -> RelayStatus:
            cells = [one.model_copy(update={"heartbeat": self.beats.get(one.cell)}) for one in told.cells]
            return told.model_copy(update={"cells": tuple(cells), "rounds_open": self.open})

    def lasts(says: Says, cells: set[int]) -> bool:
        still = Standstill(says, cells)
        looks = []
        for _ in range(3):
            looks.append(still.lasts())
            time.sleep(0.25)
        assert not looks[0]
        return looks[-1]

    says = Says()
    assert lasts(says, {0})
    assert not lasts(says, {0, 1})  # of the other nothing was heard
    says.open = 0
    assert not lasts(says, {0})  # its round is decided, and on its way
    says.open, says.beats = 1, {0: beat, 1: beat.model_copy(update={"cell": 1, "state": "training"})}
    assert not lasts(says, {0, 1})
    assert lasts(says, {0})
