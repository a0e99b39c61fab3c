"""A process's log on disk: each line whole, or none where the disk is full; and in pieces, of which the oldest go."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from islandctl.config.paths import log_piece, log_pieces
from islandctl.config.secrets import hide

LOG, LOG_BYTES = "ISLANDCTL_LOG", "ISLANDCTL_LOG_BYTES"
"""Variables: the path of a child's log without its end, from its supervisor; and what is kept of a log in all."""
KEPT_BYTES = 256 << 20
NUM_PIECES = 4
LOOK_S = 1.0


def keep_log() -> None:
    """Under a supervisor, keep the log that it has begun for this process in pieces. A full disk loses lines."""
    base = os.environ.get(LOG)
    if base:
        with suppress(OSError):
            Pieces(Path(base).parent, Path(base).name, kept_bytes=kept_bytes()).begin()


def kept_bytes() -> int:
    """Of one log, all its pieces together."""
    return int(os.environ.get(LOG_BYTES, KEPT_BYTES))


class WholeLines(logging.Handler):
    """Writes each record at once to a file that is open for appending."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; on a full disk it is lost whole, so that the next one begins its own line."""
        try:
            data = (hide(self.format(record)) + "\n").encode(errors="replace")
        except Exception:  # a wrong format must not end the training
            self.handleError(record)
            return
        with suppress(OSError):
            written = os.write(self._descriptor, data)
            if written < len(data):  # where the disk ends, the beginning of a line is written without an error
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)


class Pieces:
    """stdout and stderr as a log in pieces. None is ever renamed or cut: an offset in a piece stays what it is.

    Whatever still has an older piece open (a child process of a script) goes on writing there, and readers find it.

    Args:
        folder: made where missing.
        log: its name, as ``rank-0``.
        kept_bytes: of all pieces together, about.
    """

    def __init__(self, folder: Path, log: str, *, kept_bytes: int) -> None:
        self._folder, self._log = folder, log
        self._piece_bytes = max(1, kept_bytes // NUM_PIECES)

    def begin(self) -> None:
        """From now on stdout and stderr go into the newest piece, and a thread begins new ones.

        Raises:
            OSError: the log cannot be opened.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        here = self._pieces()
        self._open(here[-1] if here else log_piece(self._log, 0))
        if here and not self._ends_whole(here[-1]):  # an earlier life was killed in the middle of a line
            with suppress(OSError):
                os.write(2, b"\n")
        threading.Thread(target=self._watch, name="log", daemon=True).start()

    def turn(self) -> bool:
        """Begin a new piece if the newest is full, and between two lines. The oldest goes."""
        size = os.fstat(2).st_size
        if size < self._piece_bytes:
            return False
        here = self._pieces()
        if not self._ends_whole(here[-1]) and size < 2 * self._piece_bytes:
            return False
        self._open(log_piece(self._log, self._number(here[-1]) + 1))
        for name in here[: 1 - NUM_PIECES]:
            (self._folder / name).unlink(missing_ok=True)
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with suppress(OSError, IndexError):  # a full disk, or somebody has tidied up: the old piece serves on
                self.turn()

    def _ends_whole(self, name: str) -> bool:
        with open(self._folder / name, "rb") as piece:
            size = os.fstat(piece.fileno()).st_size
            piece.seek(max(0, size - 1))
            return piece.read(1) in (b"", b"\n")

    def _open(self, name: str) -> None:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)

    def _pieces(self) -> list[str]:
        return log_pieces(path.name for path in self._folder.glob(f"{self._log}*.log")).get(self._log, [])

    def _number(self, name: str) -> int:
        return int(name.removeprefix(self._log).removesuffix(".log").strip(".") or 0)
