"""Lines of a rank's log on a disk that fills up."""

import logging
from pathlib import Path

from islandctl.worker.lines import WholeLines
from tests.disk import files_at_most


def test_a_full_disk_takes_whole_lines_or_none(tmp_path: Path) -> None:
    with open(tmp_path / "rank-0.log", "ab", buffering=0) as file:
        handler = WholeLines(file.fileno())

        def say(text: str, *values: object) -> None:
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, values, None))

        with files_at_most(50):
            for number in range(4):
                say("line %d of a log", number)  # 16 bytes with its end
        say("there is space again")
    told = (tmp_path / "rank-0.log").read_text().splitlines()
    assert told == ["line 0 of a log", "line 1 of a log", "line 2 of a log", "there is space again"]


def test_a_record_that_cannot_be_written_down_ends_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "rank-0.log", "ab", buffering=0) as file:
        handler = WholeLines(file.fileno())
        before, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
        finally:
            logging.raiseExceptions = before
    assert (tmp_path / "rank-0.log").read_bytes() == b""
