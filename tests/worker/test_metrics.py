"""metrics.jsonl: whole lines, also after a kill."""

import json
import os
from pathlib import Path

import pytest

from islandctl.worker.metrics import Metrics


def test_lines_are_appended_with_kind_attempt_and_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt in (1, 2):
        metrics = Metrics(path, attempt)
        metrics.write("train", 7, loss=0.1)
        metrics.close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"kind": "train", "attempt": 1, "step": 7, "loss": 0.1}
    assert second["attempt"] == 2


def test_half_a_line_left_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    Metrics(path, 1).write("train", 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_full_disk_loses_the_line_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 1)
    metrics.write("train", 1)
    write = os.write

    def half(file: int, content: bytes) -> int:
        write(file, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    metrics.write("train", 2)
    monkeypatch.undo()
    metrics.write("train", 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
