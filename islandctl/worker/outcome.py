"""``outcome.json``: how the workers ended, in their own words. The supervisor reads it."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from islandctl.config.model import Model
from islandctl.config.secrets import hide
from islandctl.errors import (
    CheckpointError,
    DivergenceError,
    IslandError,
    NotFiniteError,
    PreflightError,
    RelayError,
    UsageError,
)

log = logging.getLogger(__name__)
_FINAL = (UsageError, PreflightError, DivergenceError, NotFiniteError, CheckpointError)
_PASSING = (OSError, RuntimeError, MemoryError)
"""What a repetition may not meet again: a disk, a network, an accelerator (torch's errors are RuntimeErrors), memory.
Anything else is a fault of the program or its data."""
FINAL_CODES = frozenset({"halted", "stale", "held_out", "model", "forbidden", "foreign", "token"})
"""Refusals of the relay that a repetition would meet again."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""How accelerators and torch's own allocator say it."""
LESS_MEMORY = (
    "less memory: a smaller training.batch or training.sequence, more accelerators a cell, or precision: bfloat16; "
    "of a node's memory, data.limit_bytes; islandctl plan tells what each takes"
)
RESERVED_BYTES = 16 << 10
"""Held free for a rank's last word."""
LONGEST = 2000
"""Characters of a reason, and of a hint: what a message's longest path needs, within what is held free."""


class Outcome(Model):
    """The last word of a cell's workers."""

    outcome: Literal["finished", "stopped", "failed"]
    retry: bool
    """May the supervisor start the workers again?"""
    reason: str
    hint: str = ""
    kind: Literal["", "out-of-memory", "peer-lost"] = ""
    """What kind of failure, where something depends on it. ``peer-lost``: another rank was first, without a word."""
    step: int = 0
    rank: int = 0
    at: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, error: BaseException, *, step: int, rank: int) -> Outcome:
        """The outcome of an error: final where a repetition would meet the same one."""
        if isinstance(error, IslandError):
            final = isinstance(error, _FINAL)
            if isinstance(error, RelayError):
                final = error.code in FINAL_CODES
            reason, hint, retry = error.message, error.hint, not final
        else:
            reason, hint, retry = _unexpected(error, rank), "see islandctl logs", _may_pass(error)
        kind = _kind(error)
        if kind == "out-of-memory":
            hint = LESS_MEMORY
        return cls(
            outcome="failed",
            retry=retry,
            reason=hide(reason)[:LONGEST],
            hint=hide(hint)[:LONGEST],
            kind=kind,
            step=step,
            rank=rank,
            at=round(time.time(), 3),
        )

    @classmethod
    def ended(
        cls, outcome: Literal["finished", "stopped"], reason: str, *, step: int, retry: bool = False
    ) -> Outcome:
        """A good end. ``retry``: only a signal asked for it, and unless the supervisor sent that, it goes on."""
        return cls(outcome=outcome, retry=retry, reason=reason, step=step, at=round(time.time(), 3))


def _may_pass(error: BaseException) -> bool:
    broken = isinstance(error, (NotImplementedError, RecursionError))  # RuntimeErrors, but of the program
    return isinstance(error, _PASSING) and not broken


def _kind(error: BaseException) -> Literal["", "out-of-memory", "peer-lost"]:
    seen: BaseException | None = error
    while seen is not None:  # an error of ours may have come from one for lack of memory
        text = str(seen).lower()
        if isinstance(seen, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(seen, (RuntimeError, OSError)) and any(words in text for words in _NO_MEMORY)
        ):
            return "out-of-memory"
        seen = seen.__cause__
    return "peer-lost" if _lost_peer(error) else ""


def _lost_peer(error: BaseException) -> bool:
    first = (str(error) or "no message").splitlines()[0]
    return isinstance(error, RuntimeError) and ("gloo" in first or "NCCL" in first)


def _unexpected(error: BaseException, rank: int) -> str:
    first = (str(error) or "no message").splitlines()[0]
    if _lost_peer(error):
        return f"rank {rank} has lost another rank of its cell, which ended without a word: {first[:120]}"
    return f"{type(error).__name__}: {first}"


def reserve_outcome(path: Path, rank: int) -> None:
    """Hold space for the rank's last word, so that a disk that fills up cannot swallow it."""
    with suppress(OSError):
        _put(_aside(path, rank), b"")


def release_outcome(path: Path, rank: int) -> None:
    """Give the space back: another rank has the last word."""
    with suppress(OSError):
        _aside(path, rank).unlink(missing_ok=True)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write it whole and durable, unless another rank was first: the first to fail knows the cause."""
    temporary = _aside(path, outcome.rank)
    try:
        _put(temporary, outcome.model_dump_json(indent=1).encode())
        os.link(temporary, path)
    except FileExistsError:
        log.info("another rank has told the outcome already")
    except OSError as error:
        log.error("cannot write %s: %s", path, error.strerror)
    finally:
        release_outcome(path, outcome.rank)


def _aside(path: Path, rank: int) -> Path:
    return path.with_name(f".{path.name}.{rank}")


def _put(path: Path, content: bytes) -> None:
    """Write over what is there, filled up with blanks: no block is given back, and none is asked for."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    with open(file, "wb", buffering=0) as stream:
        data = memoryview(content.ljust(RESERVED_BYTES))
        while data:
            data = data[stream.write(data) or 0 :]
        os.fsync(stream.fileno())
