"""The cell's journal: at which step each round was resolved, so that a repetition does the same.

A line is on disk before the round is applied. The step matters when it cannot be told from the ledger: a round that
was resolved late because the relay was away, or as soon as its commit arrived.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from islandctl.config.model import Model
from islandctl.errors import ExchangeError
from islandctl.ledger.packet import canonical_json

RESERVED_BYTES = 1 << 16
"""Held free behind the last line: some 800 rounds, which at the usual window are 10,000 steps."""


class Resolution(Model):
    """One round, resolved by one ledger entry at one step."""

    attempt: int = Field(ge=1)
    fragment: int = Field(ge=0)
    window: int = Field(ge=0)
    seq: int = Field(ge=0)
    """The commit's."""
    step: int = Field(ge=0)


class Journal(Protocol):
    """Where resolutions are kept. Only rank 0 of a cell uses it."""

    def step_of(self, attempt: int, fragment: int, window: int) -> int | None:
        """The step at which the round was resolved in an earlier life, if it was."""

    def step_before(self, attempt: int, fragment: int, window: int) -> int | None:
        """The same in the newest earlier attempt that resolved the round."""

    def append(self, resolution: Resolution) -> None:
        """Keep it for good before returning."""


class MemoryJournal:
    """A journal that lives as long as its process: for runs that never come back, and tests."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int, int], int] = {}

    def step_of(self, attempt: int, fragment: int, window: int) -> int | None:
        return self._steps.get((attempt, fragment, window))

    def step_before(self, attempt: int, fragment: int, window: int) -> int | None:
        steps = (self._steps.get((one, fragment, window)) for one in range(attempt - 1, 0, -1))
        return next((step for step in steps if step is not None), None)

    def append(self, resolution: Resolution) -> None:
        self._steps[(resolution.attempt, resolution.fragment, resolution.window)] = resolution.step


class FileJournal(MemoryJournal):
    """One JSON line a resolution, fsynced. A torn last line (power cut while writing) is wiped out.

    Behind the last line the file holds blanks, so that a disk that fills up does not stop the next rounds.

    Raises:
        ExchangeError: a line before the last is damaged, or the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        self._end = content.rfind(b"\n") + 1
        self._size = len(content)
        for number, line in enumerate(content[: self._end].splitlines(), start=1):
            try:
                super().append(Resolution.model_validate(json.loads(line)))
            except (ValueError, ValidationError) as error:
                raise ExchangeError(f"{path}:{number}: damaged journal line") from error
        tail = content[self._end :]
        self._write(b" " * len(tail) if tail.strip(b" ") else b"")
        self._reserve()

    def append(self, resolution: Resolution) -> None:
        """Keep it for good before returning.

        Raises:
            ExchangeError: the disk is full, and what was held free is used up.
        """
        known = self.step_of(resolution.attempt, resolution.fragment, resolution.window)
        if known == resolution.step:
            return
        line = canonical_json(resolution.model_dump()) + b"\n"
        self._write(line)
        self._end += len(line)
        super().append(resolution)
        if self._size - self._end < RESERVED_BYTES // 2:
            self._reserve()

    def _write(self, data: bytes) -> None:
        """Put ``data`` behind the last line, durably; what could be written of it is wiped out after an error."""
        try:
            self._put(data, self._end)
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self._end)
                self._size = self._end
            raise ExchangeError(
                f"{self.path}: cannot be written: {error.strerror}",
                hint="free space on this disk; then the worker's next start goes on, or islandctl resume",
            ) from error

    def _reserve(self) -> None:
        """Blanks up to RESERVED_BYTES behind the last line, as far as the disk has room."""
        with suppress(OSError):
            self._put(b" " * (self._end + RESERVED_BYTES - self._size), self._size)

    def _put(self, data: bytes, at: int) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while data:
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
                self._size = max(self._size, at)
            os.fsync(file)
        finally:
            os.close(file)
