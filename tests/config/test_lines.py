"""Lines of a rank's log on a disk that fills up."""

import logging
import subprocess
import sys
from pathlib import Path

from islandctl.config.lines import WholeLines
from islandctl.config.paths import log_pieces
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


def test_a_log_in_pieces_keeps_every_line_whatever_writes(tmp_path: Path) -> None:
    """The loop's own lines, and those of a child process that has an older piece open."""
    program = """
import os, subprocess, sys
from pathlib import Path
from islandctl.config.lines import Pieces
pieces = Pieces(Path(sys.argv[1], "logs"), "rank-0", kept_bytes=4 * 600)
pieces.begin()
child = subprocess.Popen(["sh", "-c", "read go; echo child a; echo child b"], stdin=subprocess.PIPE)
for number in range(100):
    print("line", number, flush=True)
    pieces.turn()
child.communicate(b"go")
print("half", end="", flush=True)
"""
    root = Path(__file__).parent.parent.parent
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=True, timeout=60)
    logs = tmp_path / "logs"
    names = log_pieces(path.name for path in logs.iterdir())["rank-0"]
    assert names == ["rank-0.log", "rank-0.1.log", "rank-0.2.log"]
    lines = "".join((logs / name).read_text() for name in names).splitlines()
    told = [line for line in lines if line.startswith("line")]
    assert told == [f"line {number}" for number in range(100)] * 2
    assert [lines.count(f"child {one}") for one in "ab"] == [2, 2]
    for _ in range(3):
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, check=True, timeout=60)
    kept = log_pieces(path.name for path in logs.iterdir())["rank-0"]
    assert len(kept) == 4
    assert "rank-0.log" not in kept
