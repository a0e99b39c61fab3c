from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from islandctl.errors import ExchangeError
from islandctl.exchange.journal import RESERVED_BYTES, FileJournal, MemoryJournal, Resolution
from tests.disk import files_at_most

FIRST = Resolution(attempt=1, fragment=2, window=3, seq=9, step=40)


def test_kept_over_a_restart_and_by_attempt(tmp_path: Path) -> None:
    FileJournal(tmp_path / "journal.jsonl").append(FIRST)
    again = FileJournal(tmp_path / "journal.jsonl")
    assert again.step_of(1, 2, 3) == 40
    assert again.step_of(2, 2, 3) is None
    again.append(FIRST)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
    again.append(FIRST.model_copy(update={"attempt": 2, "step": 44}))
    assert FileJournal(tmp_path / "journal.jsonl").step_of(2, 2, 3) == 44


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    FileJournal(path).append(FIRST)
    whole = path.read_bytes().rstrip(b" ")
    for rest in (b"", b" " * 100):
        path.write_bytes(whole + whole[:20] + rest)
        journal = FileJournal(path)
        assert path.read_bytes().rstrip(b" ") == whole
    journal.append(FIRST.model_copy(update={"window": 4}))
    assert FileJournal(path).step_of(1, 2, 4) == 40


def test_a_full_disk_takes_the_rounds_that_were_provided_for_and_then_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path)
    with files_at_most(RESERVED_BYTES):
        for window in range(800):
            journal.append(FIRST.model_copy(update={"window": window}))
        taken = 800
        with suppress(ExchangeError):
            while taken < 2000:
                journal.append(FIRST.model_copy(update={"window": taken}))
                taken += 1
        with pytest.raises(ExchangeError, match=r"journal.jsonl: cannot be written: File"):
            journal.append(FIRST.model_copy(update={"window": taken}))
    again = FileJournal(path)  # nothing half is left, and now there is space
    assert again.step_of(1, 2, taken - 1) == 40
    assert again.step_of(1, 2, taken) is None
    again.append(FIRST.model_copy(update={"window": taken}))
    assert FileJournal(path).step_of(1, 2, taken) == 40


def test_where_there_was_never_space_the_first_round_says_so(tmp_path: Path) -> None:
    with files_at_most(50):
        journal = FileJournal(tmp_path / "journal.jsonl")
        with pytest.raises(ExchangeError, match="cannot be written"):
            journal.append(FIRST)
    assert (tmp_path / "journal.jsonl").read_bytes() == b""


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"attempt": 0}\n')
    with pytest.raises(ExchangeError, match=r"journal\.jsonl:1"):
        FileJournal(path)


def test_memory_journal() -> None:
    journal = MemoryJournal()
    journal.append(FIRST)
    assert journal.step_of(1, 2, 3) == 40
