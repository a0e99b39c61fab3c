"""``metrics.jsonl``: what happened, one JSON object a line, written by rank 0.

Every line has ``kind``, ``attempt``, ``step`` and ``time`` (seconds since 1970, for people). Kinds:

    start       the loop begins: checkpoint (its name, or empty), num_ranks, life (as the supervisor counts)
    train       one step: tokens (so far), tokens_per_s, peak_bytes, and what the loop tells; the built-in one: loss
                (nats per token), balance, grad_norm, lr
    eval        held-out text: bits_per_byte
    waiting     the loop stands still: reason; until the next line of another kind
    exchange    rounds so far: what the exchange counts (applied, skipped, late, …)
    checkpoint  a whole one was written: path, seconds; or error
    end         outcome, reason

Where cells take unequal steps (``exchange.pace: measured``), ``step`` is the cell's own, and every line has
``window``: the whole windows behind it, by which cells can be compared.

A worker that comes back repeats steps since its checkpoint and writes their lines again. A reader keeps the last
line of each (kind, attempt, step); of several attempts, the newest one that has the step.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes that this rank has held at most: of the accelerator what torch has reserved, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Metrics:
    """Appends lines, each in one write, so that a reader never meets half a line of a living worker.

    A full disk loses lines, never the training.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.path, self.attempt = path, attempt
        self._file: int | None = None
        with suppress(OSError):
            self._open()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one line; on a full disk it is lost."""
        line = {"kind": kind, "attempt": self.attempt, "step": step, "time": round(time.time(), 3), **values}
        data = (json.dumps(line) + "\n").encode()
        with suppress(OSError):
            file = self._open()
            # where the disk ends, the beginning of a line is written without an error
            if os.write(file, data) < len(data):
                self._drop_torn_line(file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._drop_torn_line(self._file)
        return self._file

    @staticmethod
    def _drop_torn_line(file: int) -> None:
        """What a full disk, or a kill in the middle of a write, left behind the last line's end."""
        size = os.fstat(file).st_size
        tail = os.pread(file, 1 << 16, max(0, size - (1 << 16)))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(file, size - torn)
