"""The cell's journal: at which step each round was resolved, so that a repetition does the same.

A line is on disk before the round is applied. The step matters when it cannot be told from the ledger: a round that
was resolved late because the relay was away, or as soon as its commit arrived.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from islandctl.config.model import Model
from islandctl.errors import ExchangeError
from islandctl.ledger.packet import canonical_json


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
    """One JSON line a resolution, fsynced. A torn last line (power cut while writing) is cut off.

    Raises:
        ExchangeError: a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                super().append(Resolution.model_validate(json.loads(line)))
            except (ValueError, ValidationError) as error:
                raise ExchangeError(f"{path}:{number}: damaged journal line") from error
        if whole < len(content):
            os.truncate(path, whole)

    def append(self, resolution: Resolution) -> None:
        known = self.step_of(resolution.attempt, resolution.fragment, resolution.window)
        if known == resolution.step:
            return
        with open(self.path, "ab") as file:
            file.write(canonical_json(resolution.model_dump()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        super().append(resolution)
