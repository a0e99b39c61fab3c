"""What the outside asks of a worker process: a stop by signal, a checkpoint by file."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

SAVE = "save"
"""A file of this name in the cell's folder asks for a checkpoint at the next step."""

SPENT = "spent"
"""A file of this name in the supervisor's folder tells that the budget is used up."""


class Stopped(Exception):
    """A signal ended the process where nothing was to be saved yet."""


class Wishes:
    """Heard at any time, granted by the loop between two steps.

    Args:
        folder: the cell's.
        node: the supervisor's, where there is one.
    """

    def __init__(self, folder: Path, node: Path | None = None) -> None:
        self._file = folder / SAVE
        self._spent = (node or folder) / SPENT
        self.stopping = False
        """A signal has asked for a checkpoint and the end."""
        self._hurry: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """From now on TERM and INT end the process after a checkpoint."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def hurry_up(self, hurry: Callable[[], None]) -> None:
        """Call ``hurry`` as soon as the process is asked to end, so that it does not stand still until then."""
        self._hurry = hurry
        if self.stopping:
            hurry()

    def take_save(self) -> bool:
        """Whether the file is there; it is gone afterwards."""
        if not self._file.exists():
            return False
        self._file.unlink(missing_ok=True)
        return True

    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self._spent.exists()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        self._hurry()
