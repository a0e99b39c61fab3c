"""A host: one machine of a site, reached somehow. Everything that happens on a node goes through here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completed:
    """What a command gave back. ``code`` is None when it is not known (link lost, killed by a signal over SSH)."""

    code: int | None
    stdout: bytes
    stderr: bytes


class Host(Protocol):
    """One machine. Calls are safe from several threads; each has a deadline.

    Raises everywhere: ``UnreachableError`` (no answer, link lost, deadline), ``HostKeyError``, ``PreflightError``.
    """

    label: str
    """``site/host``, as messages name it."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run one command; its arguments arrive as they are, whatever the login shell.

        A command killed on the host by signal N has code 128 + N.
        """

    def python(
        self,
        source: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float,
        payload: bytes = b"",
        interpreter: str = "python3",
    ) -> Any:
        """Run a Python program (3.8 or newer, standard library only) on the host and return its result.

        ``source`` defines ``main(args, payload)`` which returns a JSON value. Source, arguments and payload travel
        on stdin, the result comes back between random markers: no quoting, no shell noise, nothing on the command
        line. An exception in ``main`` becomes a ``PreflightError`` that names the host and the last line.
        """

    def feed(self, source: str, args: Mapping[str, Any], pieces: Iterable[bytes], *, timeout_s: float) -> Any:
        """As ``python``, for much data: ``main(args, stream)`` reads ``pieces`` as they come.

        It may return before it has read all of them.
        """

    def close(self) -> None:
        """Give the connection back."""
