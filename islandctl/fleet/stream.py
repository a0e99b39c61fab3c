"""The bytes to a host's SSH server: over TCP, or through the ssh configuration's ProxyCommand.

Not left to fabric and paramiko: their TCP gives up at the first address of a name that does not answer, and their
ProxyCommand runs without a shell and loses what the command says.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import wire
from islandctl.fleet.openssh import KEEPALIVE_COUNT, KEEPALIVE_S, Hop


class Attentive:
    """A connection's bytes, given up when the other side has been asked for a sign of life and gives none.

    The kernel's own keepalive does not see a server that hangs, nor what lies behind a jump host. Stands in for a
    socket with paramiko, which reads and writes with short deadlines and so comes by here often.
    """

    def __init__(self, stream: Any, patience_s: float) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._heard = time.monotonic()
        self._asked: float | None = None
        self.silence = ""
        """Why the connection was given up; empty: it was not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def asked(self) -> None:
        """The other side is being asked for an answer."""
        if self._asked is None:
            self._asked = time.monotonic()

    def recv(self, size: int) -> bytes:
        """As a socket's."""
        try:
            data: bytes = self._stream.recv(size)
        except TimeoutError:
            self._judge(self._asked)
            raise
        self._heard, self._asked = time.monotonic(), None
        return data

    def send(self, data: bytes) -> int:
        """As a socket's. What cannot be sent, since the other side takes nothing, is a question as well."""
        try:
            return int(self._stream.send(data))
        except TimeoutError:
            self._judge(self._asked or self._heard)
            raise

    def _judge(self, since: float | None) -> None:
        if since is not None and time.monotonic() - since >= self._patience_s:
            self.silence = f"no answer for {self._patience_s:g} s"
            raise ConnectionAbortedError(errno.ECONNABORTED, self.silence)


def open_stream(label: str, hop: Hop) -> tuple[socket.socket, Callable[[], str]]:
    """A socket to the server, and a function that tells what a proxy command had to say when it stops.

    Raises:
        PreflightError: the proxy command cannot be run.
        UnreachableError: no name, no route, refused, no answer in time.
    """
    if hop.proxy_command is not None:
        return _proxy(label, hop.proxy_command)
    place = f"{hop.host} port {hop.port}"
    try:
        sock = _connect(hop)
    except socket.gaierror as error:
        raise UnreachableError(
            f"{label}: the name {hop.host} is not known ({error.strerror})",
            hint=f"check the spelling in the site profile, or: ssh -G {hop.by_hand} | grep hostname",
        ) from error
    except TimeoutError as error:
        raise UnreachableError(
            f"{label}: {place} gave no answer within {hop.connect_timeout_s:g} s",
            hint="check that the machine runs and that a firewall lets you through",
        ) from error
    except ConnectionRefusedError as error:
        raise UnreachableError(
            f"{label}: {place} refused the connection", hint="check the port in the profile, and that sshd runs there"
        ) from error
    except OSError as error:
        raise UnreachableError(
            f"{label}: {place}: {error.strerror or error}", hint=f"check: ssh {hop.by_hand}"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel gives a dead link up by itself; paramiko's keepalive does not wait for answers.
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * KEEPALIVE_COUNT * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock, str


def _connect(hop: Hop) -> socket.socket:
    """Connect to the first of the host's addresses that answers."""
    trouble = OSError("no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(hop.host, hop.port, hop.family, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(hop.connect_timeout_s)
            if hop.source is not None:
                sock.bind((hop.source, 0))
            sock.connect(place)
            return sock
        except OSError as error:
            sock.close()
            trouble = error
    raise trouble


def _proxy(label: str, command: str) -> tuple[socket.socket, Callable[[], str]]:
    """Run a ProxyCommand on a socket pair, without a terminal to ask anything on."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise PreflightError(f"{label}: cannot run ProxyCommand {command!r}: {error.strerror}") from error
    finally:
        theirs.close()
    said: list[bytes] = []
    listener = threading.Thread(target=lambda: said.append(process.communicate()[1]), daemon=True)
    listener.start()  # also reaps the process, which ends when our side is closed

    def complaint() -> str:
        listener.join(1.0)
        text = wire.last_line(b"".join(said))
        return f"; ProxyCommand said: {text}" if text else ""

    return ours, complaint
