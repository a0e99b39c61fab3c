"""A rank's pulse: the file by which the supervisor sees that the rank gets on. No torch."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median

RESTING = "resting"
"""The state before ``attach`` and after ``finish``: what a script does there may take as long as it likes."""
DUMP_SIGNAL = signal.SIGQUIT
"""``kill -QUIT PID`` has a rank write the stacks of all its threads into its log; it goes on afterwards."""
APART_S = 0.5
"""Between two writings while nothing but time passes."""
SIZE_BYTES = 512
"""Of the file, blanks included: it is written over in place, so that a full disk does not stop it."""


class Pulse:
    """Beats whenever the loop gets on: at a step, at another state, at every second of a wait that is meant.

    Args:
        folder: the supervisor's; None: there is none, and nothing is written.
        rank: this one.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file: int | None = None
        self._rank, self._state, self._step, self._count = rank, RESTING, 0, 0
        self._over = False
        self._written = self._stepped = time.monotonic()
        self._steps: deque[float] = deque(maxlen=50)
        """Seconds of the last steps."""
        if folder is None:
            return
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        with suppress(OSError):
            self._file = os.open(folder / f"pulse-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._write()

    def beat(self, state: str | None = None, step: int | None = None) -> None:
        """The loop gets on, and is in this state at this step; None: as before."""
        if self._over:
            return
        state, step, now = state or self._state, self._step if step is None else step, time.monotonic()
        self._count += 1
        if step > self._step:
            self._steps.append((now - self._stepped) / (step - self._step))
            self._stepped = now
        if state != self._state or now > self._written + APART_S:
            self._state, self._step, self._written = state, step, now
            self._write()
        self._step = step

    def rest(self) -> None:
        """The loop is over: nothing more is promised."""
        self.beat(RESTING)
        self._over = True

    def _write(self) -> None:
        if self._file is None:
            return
        told = {
            "rank": self._rank,
            "pid": os.getpid(),
            "birth": _birth(),
            "dump_signal": int(DUMP_SIGNAL),
            "state": self._state,
            "step": self._step,
            "beats": self._count,
            "step_s": round(median(self._steps), 4) if self._steps else None,
        }
        with suppress(OSError):
            os.pwrite(self._file, json.dumps(told).encode().ljust(SIZE_BYTES), 0)


def _birth() -> int | None:
    """When this process began, as the supervisor counts: with the pid it names one process for good."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
