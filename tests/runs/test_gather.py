"""Looks at runs whose files lie on this machine; no process of the runs is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.paths import RunFolder
from islandctl.fleet import supervisor
from islandctl.runs import record as records
from islandctl.runs.files import holder, only_one
from islandctl.runs.gather import Watcher, before_the_end
from islandctl.runs.record import RunRecord
from islandctl.runs.status import RunStatus

from . import builders as make


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    return tmp_path


def look(record: RunRecord) -> RunStatus:
    with Watcher(record, lambda line: None) as watcher:
        return watcher.look()


def record(tmp_path: Path, **changes: Any) -> RunRecord:
    made = records.create(make.plan(), "demo", launcher_pid=0)
    cells = []
    for cell in make.record().cells:
        folder = tmp_path / cell.name
        node = cell.nodes[0].model_copy(update={"cell_folder": str(folder), "folder": str(folder / "node-0")})
        (folder / "node-0").mkdir(parents=True)
        cells.append(cell.model_copy(update={"nodes": (node,)}))
    return records.change(made, **{"cells": tuple(cells), "phase": "launched", **changes})


def test_a_launcher_that_is_dead_but_not_reaped_launches_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    made = records.create(make.plan(), "demo", launcher_pid=child.pid)
    view = look(made)
    child.wait()
    assert (view.state, view.detail) == ("failed", "the launch was cut short: the process that was at it is gone")


def test_a_launcher_is_alive_before_and_while_it_holds_the_lock() -> None:
    made = records.create(make.plan(), "demo", launcher_pid=os.getpid())
    assert look(made).state == "launching"
    lock = RunFolder.of("demo").root / "lock"
    with only_one(lock, "islandctl launch demo"):
        assert holder(lock) == f"islandctl launch demo (process {os.getpid()})"
        assert look(made).state == "launching"
    assert holder(lock) == ""
    assert look(made).state == "failed"  # the number has gone to a process that never launched


def test_figures_go_on_after_a_stop_before_the_first_step_of_an_attempt(tmp_path: Path) -> None:
    made = record(tmp_path, attempt=2, phase="stopped")
    entries = [
        {"kind": "eval", "attempt": 1, "step": 0, "bits_per_byte": 8.0},
        {"kind": "train", "attempt": 1, "step": 20, "tokens": 2000, "loss": 3.0},
        {"kind": "start", "attempt": 2, "step": 20},
        {"kind": "end", "attempt": 2, "step": 20, "outcome": "stopped"},
    ]
    state = {"state": "ended", "boot_id": "b", "supervisor_pid": 1, "supervisor_birth": 1}
    for name in make.CELLS:
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        (tmp_path / name / "node-0" / "state.json").write_text(json.dumps(state))
        (tmp_path / name / "node-0" / "exit.json").write_text(json.dumps({"outcome": "stopped", "reason": ""}))
    view = look(made)
    assert (view.state, view.step) == ("stopped", 20)
    assert view.cells[0].bits_per_byte == ((0, 8.0),)
    assert (view.cells[0].tokens, view.cells[0].source) == (2000, "files")


def ended(tmp_path: Path, outcome: str, reason: str) -> None:
    for name in make.CELLS:
        state = {"state": "ended", "boot_id": "b", "supervisor_pid": 1, "supervisor_birth": 1}
        (tmp_path / name / "node-0" / "state.json").write_text(json.dumps(state))
        (tmp_path / name / "node-0" / "exit.json").write_text(json.dumps({"outcome": outcome, "reason": reason}))


@pytest.mark.parametrize(
    ("outcome", "reason", "known", "kept"),
    [
        ("finished", "", "finished", "finished"),
        ("stopped", "stopped by budget: 2 h of 2 h used", "stopped", "stopped by budget: 2 h of 2 h used"),
        ("failed", "disk full", "failed", "failed: east, node east/local: disk full"),
    ],
)
def test_an_end_that_a_look_has_seen_is_kept(
    tmp_path: Path, outcome: str, reason: str, known: str, kept: str
) -> None:
    made = record(tmp_path)
    ended(tmp_path, outcome, reason)
    assert look(made).state == known
    after = records.load("demo")
    assert (after.phase, after.reason, after.last_known) == ("launched", kept, known)
    assert look(after).state == known


def test_a_rank_that_ended_before_its_log_began_has_its_last_lines_from_the_node_s(tmp_path: Path) -> None:
    made = record(tmp_path)
    ended(tmp_path, "failed", "rank 0 (process 7): exit code 1; 10 restarts without progress")
    told = {"outcome": "failed", "reason": "exit code 1", "rank": 0, "code": 1, "kind": "crash"}
    (tmp_path / "east" / "node-0" / "exit.json").write_text(json.dumps(told))
    logs = tmp_path / "east" / "node-0" / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("2026-01-01 00:00:00,000 INFO step 20: of an earlier life\n")
    report = (
        "E0101 00:00:00.000 9 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n=====\n"
    )
    (logs / "node-0.log").write_text(f"{report}Traceback\nImportError: libfar.so.1: no such file\n\n{report}")
    culprit = look(made).culprit
    assert culprit is not None
    assert culprit.lines[-1] == "ImportError: libfar.so.1: no such file"


def test_what_another_command_is_at_is_not_written_over(tmp_path: Path) -> None:
    made = record(tmp_path)
    ended(tmp_path, "finished", "")
    with only_one(RunFolder.of("demo").root / "lock", "islandctl stop demo"):
        assert look(made).state == "finished"
    assert records.load("demo").reason == ""


def test_figures_of_files_are_as_old_as_their_newest_line(tmp_path: Path) -> None:
    made = record(tmp_path)
    state = {"state": "running", "boot_id": supervisor.boot_id(), "restarts": 0, "beat": time.time()}
    me = {"supervisor_pid": os.getpid(), "supervisor_birth": supervisor.birth(os.getpid())}
    for name, age in zip(make.CELLS, (1.0, 40.0), strict=True):
        line = {"kind": "train", "attempt": 1, "step": 20, "tokens": 2000, "loss": 3.0, "tokens_per_s": 200.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({**line, "time": time.time() - age}) + "\n")
        (tmp_path / name / "node-0" / "state.json").write_text(json.dumps({**state, **me}))
    view = look(made)
    assert [(cell.state, cell.tokens_per_s) for cell in view.cells] == [("training", 200.0), ("silent", None)]
    assert view.cells[1].heartbeat_age_s == pytest.approx(40.0, abs=8.0)
    assert view.eta_s is None


@pytest.mark.parametrize(
    ("outcome", "state", "asked"),
    [
        ("finished", "training", True),
        ("finished", "finished", False),
        ("failed", "training", False),
        ("", "training", False),
    ],
)
def test_an_end_that_the_relay_s_file_does_not_have_is_asked_for(outcome: str, state: str, asked: bool) -> None:
    nodes = [make.node(0, make.ended(outcome) if outcome else make.running()), make.node(1, make.running())]
    told = make.relay({0: make.heartbeat(0, state=state), 1: make.heartbeat(1)})
    assert before_the_end(told, nodes, attempt=1) is asked
    assert before_the_end(told, nodes, attempt=2) is False
