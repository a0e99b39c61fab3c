"""A node of Slurm as a host, while a job of ours is on it: what is asked and answered travels as mail."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from islandctl.errors import IslandError, UnreachableError
from islandctl.fleet import wire
from islandctl.fleet.host import Completed
from islandctl.fleet.interpreter import Gone, Interpreter

MAIL_S = 15.0
"""For a question and its answer to lie about in files."""
PIECE_BYTES = 1 << 20


class Mail:
    """What goes to one node and comes from it, as a ``Stream`` of its interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out, self._gone = bytearray(), 0
        self._ended = False
        self._come: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.received = 0
        """Bytes that have come."""
        self.why: IslandError | None = None
        """Why nothing passes any more, where that is known."""

    def sendall(self, data: bytes, /) -> None:
        """See ``Stream``."""
        with self._lock:
            if self._ended:
                raise OSError("nothing passes any more")
            self._out += data

    def recv(self, size: int, /) -> bytes:
        """See ``Stream``."""
        data = self._come.get()
        if not data:
            self._come.put(b"")
        return data

    def close(self) -> None:
        """See ``Stream``."""
        self.end(None)

    def end(self, why: IslandError | None) -> None:
        """Nothing passes any more. The first reason stands."""
        with self._lock:
            self.why = self.why or why
            if not self._ended:
                self._ended = True
                self._come.put(b"")

    @property
    def waiting(self) -> tuple[int, bytes]:
        """What has not been carried yet: where it belongs in the file, and the next bytes."""
        with self._lock:
            return self._gone, bytes(self._out[:PIECE_BYTES])

    def sent(self, upto: int) -> None:
        """All before this place in the file is there."""
        with self._lock:
            del self._out[: upto - self._gone]
            self._gone = upto

    def deliver(self, data: bytes) -> None:
        """This has come."""
        self.received += len(data)
        self._come.put(data)


class NodeOfJob:
    """A node of a visit's job, as a host; see ``Host``. It is named as Slurm names it.

    Args:
        label: ``site/node``.
        name: the node's.
        job: Slurm's number.
        mail: the way to it.
    """

    def __init__(self, label: str, name: str, job: str, mail: Mail) -> None:
        self.label, self.name, self.job = label, name, job
        self._mail = mail
        self._interpreter = Interpreter(mail)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run one command; see ``Host.run``."""
        return wire.run(self, argv, stdin, timeout_s)

    def python(
        self,
        source: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float,
        payload: bytes = b"",
        interpreter: str = "python3",
    ) -> Any:
        """Run a Python program; see ``Host.python``."""
        if interpreter != "python3":
            return self._apart(wire.call(source, args, payload, timeout_s), b"", interpreter, timeout_s)
        try:
            value = self._interpreter.call(source, args, payload, timeout_s + MAIL_S)
        except TimeoutError as error:
            raise wire.late(self.label, "a command", timeout_s) from error
        except Gone as error:
            lost = UnreachableError(
                f"{self.label}: no word comes from Slurm's job {self.job} there any more; state unknown",
                hint="run the command again",
            )
            raise (self._mail.why or lost) from error
        if "died" in value:
            raise wire.no_answer(self.label, value["died"] if value["died"] >= 0 else None, "no output", "python3")
        return wire.judged(self.label, value)

    def feed(self, source: str, args: Mapping[str, Any], pieces: Iterable[bytes], *, timeout_s: float) -> Any:
        """Run a Python program on a stream; see ``Host.feed``."""
        return self._apart(
            wire.call(source, args, b"", timeout_s, stream=True), b"".join(pieces), "python3", timeout_s
        )

    def _apart(self, call: wire.Call, more: bytes, interpreter: str, timeout_s: float) -> Any:
        done = self.run([interpreter, "-I", "-c", wire.BOOT], stdin=call.stdin + more, timeout_s=timeout_s)
        return wire.result(self.label, call, done)

    def close(self) -> None:
        """Nothing is held: the job ends with its visit."""
