"""One Python that stays on a host while its connection stands: a call is a round trip and a fork, no new process.

Both directions carry frames over one channel. A request is ``NUMBER SIZE PAYLOAD_SIZE``, a line end, JSON of that
size (``program``: the hash of the program's text, ``text``: the text itself, the first time; ``args``, ``alarm_s``)
and the payload. An answer is a random marker, ``NUMBER SIZE``, a line end and JSON: ``result``, ``error``, or
``died`` with the exit code (negative: the signal). The first is empty, with the number 0. What the login shell
prints, or something that it has left running, lies before a marker and is skipped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from islandctl.fleet.wire import ALARM_OVER_S, HOME

START_S = 60.0
"""For a Python to start on a busy node, at the first call, over that call's own time."""
DOUBT_S = 15.0
"""Without a sign of it for so long it is asked whether there is a shell at all that would start it."""


class Stream(Protocol):
    """Both ends of a program that runs on a host."""

    def sendall(self, data: bytes, /) -> None:
        """Raises OSError when the stream has ended."""

    def recv(self, size: int, /) -> bytes:
        """What has come, at least a byte; empty: the end. Raises OSError."""

    def close(self) -> None:
        """End it."""


ENDED = "connection closed"
MIXED = "its answer was mixed with what something else prints there: does a file of the login shell start that?"


class Gone(Exception):
    """The interpreter has ended, or the link to it; what the call did is unknown. Its words say how."""


class Interpreter:
    """See the module. Safe from several threads; calls run side by side.

    Args:
        stream: of the command line that runs ``wire.BOOT``.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._programs: set[str] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._marker = f"<<{secrets.token_hex(8)}>>".encode()
        self._ended = False
        self._how = ENDED
        self.started = False
        """Whether anything has come from it: if not, there may be no Python at all."""
        stage = f"{_source()}\n{HOME}\nserve(_drain(), {self._marker!r})\n".encode()
        self._first = b"%d\n%b" % (len(stage), stage)
        self._reader = threading.Thread(target=self._read, name="interpreter", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether it still answers, as far as is known."""
        return not self._ended

    def call(
        self,
        source: str,
        args: Mapping[str, Any],
        payload: bytes,
        timeout_s: float,
        doubt: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run ``main(args, payload)`` of a program; its answer.

        Args:
            doubt: called when nothing at all has come from there for ``DOUBT_S``; what it raises ends the call.

        Raises:
            TimeoutError: no answer in time; the program ends itself a little later.
            Gone: there is nobody to answer any more.
        """
        program = hashlib.sha256(source.encode()).hexdigest()
        waiting = _Waiting()
        request: dict[str, Any] = {"program": program, "args": dict(args), "alarm_s": int(timeout_s) + ALARM_OVER_S}
        with self._lock:
            if self._ended:
                raise Gone(self._how)
            if program not in self._programs:
                request["text"] = source
            number = next(self._numbers)
            self._waiting[number] = waiting
            text = json.dumps(request).encode()
            try:
                self._stream.sendall(self._first + b"%d %d %d\n%b" % (number, len(text), len(payload), text))
                self._first = b""
                if payload:
                    self._stream.sendall(payload)
            except (OSError, EOFError) as error:
                self._waiting.pop(number, None)
                raise Gone(str(error)) from error
            self._programs.add(program)
        patience_s = timeout_s + (0.0 if self.started else START_S)
        if not self.started and patience_s > DOUBT_S and not waiting.done.wait(DOUBT_S):
            patience_s -= DOUBT_S
            if not self.started:
                doubt()
        if not waiting.done.wait(patience_s):
            self._waiting.pop(number, None)
            raise TimeoutError
        if waiting.answer is None:
            raise Gone(self._how)
        return waiting.answer

    def late(self, timeout_s: float, python: str) -> tuple[str, float]:
        """Of a call that got no answer in time: what gave none, and how long it was waited for."""
        return ("a command", timeout_s) if self.started else (python, timeout_s + START_S)

    def close(self) -> None:
        """End it; calls that wait raise ``Gone``."""
        self._stream.close()

    def close_if_idle(self) -> None:
        """Make room for another session, where no call is under way."""
        with self._lock:
            if not self._waiting:
                self._ended = True
                self._stream.close()

    def _read(self) -> None:
        arrived = bytearray()
        try:
            while data := self._stream.recv(1 << 18):
                arrived += data
                self._deliver(arrived)
        except (OSError, EOFError):
            self._stream.close()
        except ValueError:  # from here on nothing can be trusted
            self._how = MIXED
            self._stream.close()
        with self._lock:
            self._ended = True
        for number in list(self._waiting):
            if waiting := self._waiting.pop(number, None):
                waiting.done.set()

    def _deliver(self, arrived: bytearray) -> None:
        """Hand out the whole answers among what has come, and take them away from it, with what lies before them."""
        while (begin := arrived.find(self._marker)) >= 0:
            self.started = True
            del arrived[:begin]
            end = arrived.find(b"\n")
            if end < 0:
                return
            number, size = (int(word) for word in arrived[len(self._marker) : end].split())
            if len(arrived) < end + 1 + size:
                return
            text = bytes(arrived[end + 1 : end + 1 + size])
            if number:
                answer = json.loads(text)
                waiting = self._waiting.pop(number, None)
                if waiting is not None:  # else it was given up
                    waiting.answer = answer
                    waiting.done.set()
            del arrived[: end + 1 + size]
        del arrived[: -len(self._marker)]


class _Waiting:
    """One call on its way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: dict[str, Any] | None = None


_DRAIN = """
def _drain():
    # what the buffered reader that brought this program has read beyond it; it is not used any more
    os.set_blocking(0, False)
    ahead = i.peek(1)
    ahead = i.read(len(ahead)) if ahead else b""
    os.set_blocking(0, True)
    return ahead
"""


@cache
def _source() -> str:
    return (Path(__file__).parent / "node_interpreter.py").read_text() + _DRAIN
