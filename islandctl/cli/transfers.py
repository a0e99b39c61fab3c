"""Large transfers while a command prepares: a bar where a person looks, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from islandctl.cli import output
from islandctl.config.units import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0
LEAST_BYTES = 4 << 20
"""A smaller one is over before a person has looked."""


class Transfers:
    """Takes messages and progress; use it as a context. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line for the person; above the bars, while there are any."""
        with self._lock:
            if self._bar is None or self._bar.finished:
                output.message(text)
            else:
                self._bar.console.print(output.shown(text), soft_wrap=True)

    def progress(self, name: str, done: int, total: int) -> None:
        """How far a transfer is, in bytes."""
        if total < LEAST_BYTES:
            return
        with self._lock:
            if output.lively(sys.stderr):
                self._draw(name, done, total)
            elif done < total and time.monotonic() - self._told.setdefault(name, time.monotonic()) >= LINE_EVERY_S:
                self._told[name] = time.monotonic()
                output.message(f"{name}: {bytes_text(done)} of {bytes_text(total)} sent")

    def _draw(self, name: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=output.console(sys.stderr), transient=True)
            self._bar.start()
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=done, total=total)
