"""What a run has left is read where it lies: here, on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from islandctl.errors import UsageError
from islandctl.relay import glance
from islandctl.relay.messages import CellStatus
from islandctl.runs.record import KeptRecord, RunRecord, change, create
from islandctl.runs.shown import shown_by
from tests.runs import builders as make


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run of two cells on this machine, without any file yet."""
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    cells = [
        cell.model_copy(
            update={
                "nodes": tuple(
                    node.model_copy(update={"cell_folder": str(tmp_path / cell.name)}) for node in cell.nodes
                )
            }
        )
        for cell in make.record().cells
    ]
    relay = KeptRecord(name="relay", python="", code="", supervisor="", folder=str(tmp_path / "relay" / "node-0"))
    (tmp_path / "relay").mkdir()
    made = make.plan()
    exchange = made.recipe.exchange.model_copy(update={"fragments": 1})
    made = made.model_copy(update={"recipe": made.recipe.model_copy(update={"exchange": exchange})})
    return change(create(made, "demo", launcher_pid=1), cells=tuple(cells), relay=relay)


def lines(folder: Path, steps: int, seconds: float) -> None:
    folder.mkdir()
    told = [
        {"kind": "train", "attempt": 1, "step": step, "time": 100 + seconds * step, "peak_bytes": 1000}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def test_a_run_that_has_not_trained_shows_nothing_yet(record: RunRecord) -> None:
    with pytest.raises(UsageError, match="demo: no step of it is known yet"):
        shown_by(record, lambda _: None)


def test_what_one_cell_shows_is_told_without_the_other(record: RunRecord, tmp_path: Path) -> None:
    lines(tmp_path / "east", 5, 0.5)
    east, west = shown_by(record, lambda _: None).cells
    assert (east.steps, east.step_s, east.memory_bytes) == (4, 0.5, 1000)
    assert (east.sent, west.steps, west.step_s) == (None, 0, None)


@pytest.mark.parametrize("name", [glance.NAME, glance.LAST_NAME])
def test_bytes_need_the_relays_counters_and_its_ledger(record: RunRecord, tmp_path: Path, name: str) -> None:
    lines(tmp_path / "east", 5, 0.5)
    cells = tuple(
        CellStatus(cell=index, name=name, packets=4, bytes_up=9000) for index, name in enumerate(make.CELLS)
    )
    glance.tell(tmp_path / "relay", make.relay(cells=cells), time.time())
    (tmp_path / "relay" / glance.NAME).rename(tmp_path / "relay" / name)
    assert shown_by(record, lambda _: None).cells[0].sent is None  # no round yet
    packets = [{"cell": cell, "step": 1, "tokens": 1, "chunks": ["h"]} for cell in (0, 1)]
    entry = {"kind": "commit", "seq": 0, "attempt": 1, "at": "", "previous": "", "version": 1, "reason": "complete"}
    entry |= {"fragment": 0, "window": 0, "named": packets}
    (tmp_path / "relay" / "ledger.jsonl").write_text(json.dumps(entry) + "\n")
    sent = shown_by(record, lambda _: None).cells[0].sent
    assert sent is not None
    assert sent > 0
