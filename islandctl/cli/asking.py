"""Questions to the person at the terminal, from any thread, one at a time."""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def questions(json: bool) -> Iterator[Callable[[str], bool] | None]:
    """A function that asks for yes or no; None where nobody could answer, or nobody should be asked (``--json``).

    Ctrl-C is a no to the question that is open and to all later ones, whichever thread asks.
    """
    if json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        yield None
        return
    turn, over = threading.Lock(), threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        over.set()
        if callable(before):
            before(number, frame)

    def ask(question: str) -> bool:
        with turn:
            if not over.is_set():
                print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
            while not over.is_set():
                if select.select([sys.stdin], [], [], 0.2)[0]:
                    return sys.stdin.readline().strip().lower() in ("y", "yes")
            return False

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield ask
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)
