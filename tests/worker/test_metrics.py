"""metrics.jsonl: whole lines, also after a kill."""

import json
from pathlib import Path

from islandctl.worker.metrics import Metrics
from tests.disk import files_at_most


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


def test_a_line_that_a_full_disk_cut_is_dropped_at_once_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 1)
    metrics.write("train", 1)
    with files_at_most(path.stat().st_size + 10):
        metrics.write("train", 2)
        metrics.write("train", 3)
    metrics.write("train", 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    metrics.close()


def test_a_file_that_cannot_be_made_yet_is_made_later(tmp_path: Path) -> None:
    path = tmp_path / "away" / "metrics.jsonl"
    metrics = Metrics(path, 1)
    metrics.write("train", 1)
    path.parent.mkdir()
    metrics.write("train", 2)
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2]
