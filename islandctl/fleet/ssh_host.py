"""A host over SSH, on top of one connection that is opened at the first use and again after a loss."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import wire
from islandctl.fleet.host import Completed
from islandctl.fleet.hostkeys import HostKeys
from islandctl.fleet.interpreter import DOUBT_S, MIXED, Gone, Interpreter
from islandctl.fleet.openssh import Hop
from islandctl.fleet.ssh import Link, login

_NO_PYTHON = re.compile(rb"not found|no such file|unknown command|permission denied", re.IGNORECASE)
STANDING_S = 20.0
"""For a session to be had for the Python that stays; without one every call starts its own."""
SHELL_S = 20.0
"""For a login shell to say a word, on a node where no Python has come up in ``DOUBT_S``."""
_PATH_COMMAND, _PATH_SEEN = """/bin/sh -c 'echo "PATH there: $PATH"'""", b"PATH there: "


class _NoInterpreter(Exception):
    """No Python stays on this host."""


class Bastions:
    """Connections to jump hosts, shared by all hosts behind them: one handshake a bastion, not one a host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._links: dict[tuple[str, ...], Link] = {}

    def link(self, way: Sequence[Hop], open_link: Callable[[], Link]) -> Link:
        """The live connection along ``way``, opened when there is none."""
        key = tuple(hop.endpoint for hop in way)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            link = self._links.get(key)
            if link is None or not link.alive:
                link = self._links[key] = open_link()
            return link

    def close(self) -> None:
        """End all of them, the farthest first."""
        with self._lock:
            for key in sorted(self._links, key=len, reverse=True):
                self._links[key].close()
            self._links.clear()


class SshHost:
    """One machine reached over SSH; see ``Host``.

    Args:
        label: ``site/host``.
        way: the servers on the way, the host last (``openssh.resolve``).
        host_keys: which host keys are believed.
        bastions: shared connections to jump hosts; left out: this host's own.
        python: the interpreter on the host, a name or a path (``~`` is the host's home).
    """

    def __init__(
        self,
        label: str,
        way: Sequence[Hop],
        host_keys: HostKeys,
        *,
        bastions: Bastions | None = None,
        python: str = "python3",
    ) -> None:
        self.label = label
        self._way = tuple(way)
        self._host_keys = host_keys
        self._bastions = bastions or Bastions()
        self._owns_bastions = bastions is None
        self._python = python
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._starting = threading.Lock()
        self._standing: Interpreter | None = None
        self._without: Link | None = None
        """The connection over which no standing Python came up."""

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
        if interpreter == "python3":
            with contextlib.suppress(_NoInterpreter):
                return self._ask(source, args, payload, timeout_s)
        call = wire.call(source, args, payload, timeout_s)
        python = self._python if interpreter == "python3" else interpreter
        done = self._shell(self._boot(python), call.stdin, timeout_s)
        if wire.answer(call, done.stdout) is None and _NO_PYTHON.search(done.stderr + done.stdout):
            self._no_python(python, wire.last_line(done.stderr) or wire.last_line(done.stdout))
        return wire.result(self.label, call, done, python)

    def feed(self, source: str, args: Mapping[str, Any], pieces: Iterable[bytes], *, timeout_s: float) -> Any:
        """Run a Python program on a stream; see ``Host.feed``."""
        call = wire.call(source, args, b"", timeout_s, stream=True)
        done = self._shell(self._boot(self._python), itertools.chain([call.stdin], pieces), timeout_s)
        return wire.result(self.label, call, done, self._python)

    def _ask(self, source: str, args: Mapping[str, Any], payload: bytes, timeout_s: float) -> Any:
        """A call of the Python that stays there.

        Raises:
            _NoInterpreter: none can be had, and nothing was run; a Python for this call alone will tell why.
        """
        link = self._connected()
        standing = self._interpreter(link)
        try:
            value = standing.call(source, args, payload, timeout_s, lambda: self._doubt(link, standing))
        except TimeoutError as error:
            raise wire.late(self.label, *standing.late(timeout_s, self._python)) from error
        except Gone as error:
            if link.alive and not standing.started:
                self._without = link
                raise _NoInterpreter from error
            if link.alive and str(error) == MIXED:
                raise wire.unknown(self.label, MIXED) from error
            raise link.lost(error) from error
        if "died" in value:
            raise wire.no_answer(self.label, value["died"] if value["died"] >= 0 else None, "no output", self._python)
        return wire.judged(self.label, value)

    def _doubt(self, link: Link, standing: Interpreter) -> None:
        """Does the login shell do what it is told, or has something swallowed the command?

        Raises:
            PreflightError: it does nothing, though the server has given it a session.
        """
        try:
            channel = link.stream(_PATH_COMMAND, SHELL_S)
        except (TimeoutError, UnreachableError):  # no session is to be had now: nothing is known
            return
        heard, end = b"", time.monotonic() + SHELL_S
        with contextlib.closing(channel), contextlib.suppress(OSError):
            channel.settimeout(SHELL_S)
            while _PATH_SEEN not in heard and time.monotonic() < end and (data := channel.recv(4096)):
                heard += data
        if _PATH_SEEN not in heard and link.alive and not standing.started:
            raise self._swallowed(f"no answer within {DOUBT_S + SHELL_S:g} s")

    def _interpreter(self, link: Link) -> Interpreter:
        with self._starting:
            if link is self._without:
                raise _NoInterpreter
            if self._standing is None or not self._standing.alive:
                try:
                    stream = link.stream(self._boot(self._python, "-I -S"), STANDING_S)
                except TimeoutError as error:
                    self._without = link
                    raise _NoInterpreter from error
                self._standing = Interpreter(stream)
                link.on_refusal = self._standing.close_if_idle
            return self._standing

    @staticmethod
    def _boot(python: str, switches: str = "-I") -> str:
        """The command line. ``-S``: no more than the standard library, found sooner."""
        return f'exec {shell_word(python)} {switches} -c "{wire.BOOT}"'

    def connect(self) -> None:
        """Log in now, so that trouble shows before anything else is done.

        Raises:
            HostKeyError, PreflightError, UnreachableError: name site, host, hop and cause.
        """
        self._connected()

    def close(self) -> None:
        """Give the connection back."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None
        if self._owns_bastions:
            self._bastions.close()

    def _shell(self, command: str, stdin: bytes | Iterable[bytes], timeout_s: float) -> Completed:
        try:
            return self._connected().run(command, stdin, timeout_s)
        except TimeoutError as error:
            raise wire.late(self.label, "a command", timeout_s) from error

    def _no_python(self, python: str, said: str) -> None:
        seen = re.search(rb"PATH there: .*", self._shell(_PATH_COMMAND, b"", 20.0).stdout)
        if seen is None:
            raise self._swallowed(said)
        raise PreflightError(
            f"{self.label}: cannot run {python}: {said} ({seen[0].decode(errors='replace').strip()})",
            hint="install Python 3.8 or newer there, or give an absolute path as environment.python in the profile",
        )

    def _swallowed(self, said: str) -> PreflightError:
        return PreflightError(
            f"{self.label}: the login shell there does not run the command that it is given: {said}",
            hint="a file that it reads (.bashrc, config.fish) may call exec: let it do so in terminals only",
        )

    def _connected(self) -> Link:
        with self._lock:
            if self._link is None or not self._link.alive:
                self._link = self._open(self._way)
            return self._link

    def _open(self, way: tuple[Hop, ...]) -> Link:
        """Log in to the last server of ``way``, through the ones before it."""
        before, hop = way[:-1], way[-1]
        below = self._bastions.link(before, lambda: self._open(before)) if before else None
        label = self.label if way == self._way else f"{self.label}: jump host {hop.alias}"
        return login(label, hop, self._host_keys, below)


def shell_word(path: str) -> str:
    """A path for the command line of any login shell; ``~/`` stays the host's home.

    Raises:
        PreflightError: it holds characters that shells treat differently.
    """
    home, rest = ("~/", path[2:]) if path.startswith("~/") else ("", path)
    if re.fullmatch(r"[A-Za-z0-9_./+@%,:=-]+", rest):
        return home + rest
    if re.search(r"['!\\\n\r\0]", rest):
        raise PreflightError(f"interpreter path {path!r} holds a quote, '!', backslash or newline", hint="rename it")
    return f"{home}'{rest}'"
