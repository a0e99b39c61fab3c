"""One SSH connection. Only this module knows fabric, and it alone with ssh_keys.py paramiko.

A fabric ``Connection`` with what fabric would decide by itself taken out of its hands: what an alias means comes from
``ssh -G`` (openssh.py), which host keys are believed from the known_hosts files (hostkeys.py), and no configuration
file is read. No pty is ever asked for: a command outlives the link it was started over.

Commands go over the connection's transport. fabric's own ``run`` feeds stdin one byte every 10 ms, decodes the output
and takes a lost link for an exit code; its ``create_session`` knows no deadline and logs in again by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import paramiko
from fabric import Config, Connection
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from islandctl.errors import IslandError, PreflightError, UnreachableError
from islandctl.fleet.host import Completed
from islandctl.fleet.hostkeys import HostKeys, KnownKey
from islandctl.fleet.openssh import KEEPALIVE_COUNT, KEEPALIVE_S, Hop
from islandctl.fleet.ssh_keys import Keys, TurnedAway, shown
from islandctl.fleet.stream import Attentive, open_stream

# Without a handler, paramiko's background threads would write to the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

HANDSHAKES = 8
"""Logins at a time to one server; sshd begins to refuse at 10 that have not authenticated (MaxStartups)."""
SESSIONS = 8
"""Commands at a time over one connection; sshd's MaxSessions is 10."""
LOGIN_TRIES = 7

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
_LIMIT_SAID = re.compile(
    r"MaxStartups|not allowed at this time|kex_exchange_identification|connection (closed|reset) by", re.IGNORECASE
)
"""What a server, or the ssh of a proxy command, says when it turns logins away."""

_handshakes: dict[str, threading.BoundedSemaphore] = {}
_handshakes_lock = threading.Lock()


class Link:
    """One live connection. Safe from several threads."""

    def __init__(self, label: str, hop: Hop, connection: Connection) -> None:
        self.label = label
        self.hop = hop
        self.connection = connection
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._opening = threading.Lock()
        self.on_refusal: Callable[[], None] = lambda: None
        """Called when the server refuses one more session."""

    @property
    def alive(self) -> bool:
        """Whether the connection still stands, as far as this side knows."""
        return bool(self.connection.is_connected)

    def close(self) -> None:
        """End it."""
        self.connection.close()

    def run(self, command: str, stdin: bytes | Iterable[bytes], timeout_s: float) -> Completed:
        """Run one command line in the login shell.

        Raises:
            TimeoutError: no end before the deadline.
            UnreachableError: the link was lost on the way; what the command did is unknown.
        """
        deadline = time.monotonic() + timeout_s
        with self._sessions:
            try:
                channel = self._session(deadline)
                with contextlib.closing(channel):
                    return self._converse(channel, command, stdin, deadline)
            except TimeoutError:
                raise
            except (paramiko.SSHException, EOFError, OSError) as error:
                if self.alive and "Timeout opening channel" in str(error):
                    raise TimeoutError from error
                raise self.lost(error) from error

    def lost(self, error: Exception) -> UnreachableError:
        """The error of a call under which the link went away."""
        stream = self.connection.transport.sock
        cause = (isinstance(stream, Attentive) and stream.silence) or str(error) or type(error).__name__
        return UnreachableError(
            f"{self.label}: the SSH link was lost ({cause}); state unknown",
            hint="run the command again; what runs on the node is not affected",
        )

    def stream(self, command: str, timeout_s: float) -> paramiko.Channel:
        """Begin a command that stays: the stream to and from it, without deadlines of its own.

        Raises:
            TimeoutError: the server has no session left.
            UnreachableError: the link was lost.
        """
        try:
            channel = self._session(time.monotonic() + timeout_s)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if self.alive:
                raise TimeoutError from error
            raise self.lost(error) from error
        channel.settimeout(None)
        return channel

    def _session(self, deadline: float) -> paramiko.Channel:
        """Open a session. A server at its MaxSessions refuses: commands given up may still run there for a while."""
        for attempt in Retrying(
            stop=stop_after_delay(deadline - time.monotonic()),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            retry=retry_if_exception_type(paramiko.ChannelException),
            reraise=True,
        ):
            # One at a time: paramiko keeps the reason of a refusal in one place for all threads.
            if attempt.retry_state.attempt_number > 1:
                self.on_refusal()
            with attempt, self._opening:
                transport: paramiko.Transport = self.connection.transport
                return transport.open_session(timeout=max(0.1, deadline - time.monotonic()))
        raise AssertionError("unreachable")

    def _converse(
        self, channel: paramiko.Channel, command: str, stdin: bytes | Iterable[bytes], deadline: float
    ) -> Completed:
        channel.settimeout(max(0.1, deadline - time.monotonic()))
        channel.exec_command(command)
        outputs: tuple[list[bytes], list[bytes]] = ([], [])

        def drain(output: list[bytes], receive: Callable[[int], bytes]) -> None:
            with contextlib.suppress(OSError):
                while data := receive(1 << 16):
                    output.append(data)

        receivers = (channel.recv, channel.recv_stderr)
        readers = [
            threading.Thread(target=drain, args=pair, daemon=True) for pair in zip(outputs, receivers, strict=True)
        ]
        for reader in readers:
            reader.start()
        with contextlib.suppress(OSError):  # a command may end without reading all: its output tells why
            for piece in (stdin,) if isinstance(stdin, bytes) else stdin:
                channel.sendall(piece)
            channel.shutdown_write()
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        ended = channel.status_event.wait(max(0.1, deadline - time.monotonic()))
        if not self.alive:
            raise EOFError("connection closed")
        if not ended or any(reader.is_alive() for reader in readers):
            raise TimeoutError
        code = channel.recv_exit_status()
        # -1 is paramiko's word for "no exit code": the command was killed by a signal.
        return Completed(code if code >= 0 else None, b"".join(outputs[0]), b"".join(outputs[1]))


def login(label: str, hop: Hop, host_keys: HostKeys, below: Link | None) -> Link:
    """Connect to a server, believe its key, authenticate.

    Args:
        label: ``site/host`` (and the jump host, if it is one), for messages.
        below: the connection to the jump host before it.

    Raises:
        HostKeyError: its key is unknown or has changed.
        PreflightError: it accepts none of the keys.
        UnreachableError: no name, no route, refused, timeout, login limit.
    """
    endpoint = hop.endpoint.rpartition("@")[2]
    # A jump host carries all handshakes of the servers behind it; a proxy command often logs in to one of its own.
    gate = f"through {below.hop.endpoint}" if below else "ProxyCommand" if hop.proxy_command else endpoint
    with _handshakes_lock:
        turn = _handshakes.setdefault(gate, threading.BoundedSemaphore(HANDSHAKES))
    try:
        for attempt in Retrying(
            stop=stop_after_attempt(LOGIN_TRIES),
            wait=wait_random_exponential(multiplier=0.2, max=8),
            retry=retry_if_exception_type(TurnedAway),
        ):
            with attempt, turn:
                return _login(label, hop, host_keys, below)
    except RetryError as error:
        where = f"jump host {below.hop.alias} or {endpoint}" if below else endpoint
        said = error.last_attempt.exception()
        raise UnreachableError(
            f"{label}: {where} closed the connection {LOGIN_TRIES} times before login "
            f"(login limit, MaxStartups?): {said}",
            hint=f"wait a little, then try again; or check: ssh -v {hop.by_hand}",
        ) from error
    raise AssertionError("unreachable")


def _login(label: str, hop: Hop, host_keys: HostKeys, below: Link | None) -> Link:
    known = host_keys.known(hop)
    sock, complaint = (None, str) if below else open_stream(label, hop)
    # Nothing but this is left to fabric's configuration: neither ssh's files are read nor fabric's own.
    connection = Connection(
        hop.host,
        hop.user,
        hop.port,
        config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        gateway=below.connection if below else False,
        forward_agent=False,
        connect_kwargs={
            "sock": sock,
            "transport_factory": _transport(known),
            "auth_strategy": Keys(label, hop),
            # The one deadline of greeting and key exchange; paramiko's own for the greeting must not come first.
            "timeout": hop.connect_timeout_s,
            "banner_timeout": 2 * hop.connect_timeout_s,
            "auth_timeout": hop.connect_timeout_s,
            "channel_timeout": hop.connect_timeout_s,
        },
    )
    connection.client.set_missing_host_key_policy(_Believe(label, hop, host_keys, known))
    try:
        connection.open()
        return Link(label, hop, connection)
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport = connection.client.get_transport()
        if transport is None and below:
            raise _no_way_on(label, hop, below, error) from error
        silent = transport is not None and transport.is_active()
        raise _no_agreement(label, hop, error, silent, complaint) from error
    finally:
        if not connection.is_connected:
            with contextlib.suppress(OSError, EOFError):
                connection.client.close()
            if sock is not None:
                sock.close()


def _transport(known: list[KnownKey]) -> Callable[..., paramiko.Transport]:
    """Makes transports that ask for a host key of a kind on file: one that can be compared."""
    kinds = [entry.kind for entry in known if not entry.marker]
    first = [name for kind in kinds for name in ([kind, *_RSA_SIGNATURES] if kind == "ssh-rsa" else [kind])]
    vouched = any(entry.marker == "CA" for entry in known)

    def make(sock: socket.socket | paramiko.Channel, **settings: Any) -> paramiko.Transport:
        stream = Attentive(sock, KEEPALIVE_S * KEEPALIVE_COUNT)
        transport = paramiko.Transport(stream, **settings)  # type: ignore[arg-type]  # all that it uses of a socket
        options = transport.get_security_options()
        plain = sorted(options.key_types, key=lambda kind: kind not in first)
        options.key_types = [f"{kind}-cert-v01@openssh.com" for kind in plain if vouched] + plain

        def ask() -> None:
            stream.asked()
            question = paramiko.Message()
            question.add_byte(paramiko.common.cMSG_GLOBAL_REQUEST)
            question.add_string("keepalive@openssh.com")
            question.add_boolean(True)  # an answer is wanted, which paramiko's own keepalive does not
            transport._send_user_message(question)  # type: ignore[attr-defined]

        transport.packetizer.set_keepalive(KEEPALIVE_S, ask)
        return transport

    return make


class _Believe(paramiko.MissingHostKeyPolicy):
    """The policy for host keys. paramiko's client is given none, so every server's key comes here."""

    def __init__(self, label: str, hop: Hop, host_keys: HostKeys, known: list[KnownKey]) -> None:
        self._check = functools.partial(host_keys.check, label, hop, known)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises HostKeyError, or returns and so believes the key."""
        self._check(shown(key))


def _no_way_on(label: str, hop: Hop, below: Link, error: Exception) -> IslandError:
    """The error for a jump host that gave no stream to the next server."""
    gate, place = below.hop.alias, f"{hop.host} port {hop.port}"
    hint = f"check: ssh -W {hop.host}:{hop.port} {below.hop.by_hand}"
    if not isinstance(error, paramiko.ChannelException):
        return UnreachableError(f"{label}: jump host {gate} gave no connection to {place}: {error}", hint=hint)
    if error.code == 1:
        return PreflightError(
            f"{label}: jump host {gate} forwards no connections (AllowTcpForwarding no?)",
            hint=f"ask its administrator, or {hint}",
        )
    return UnreachableError(f"{label}: jump host {gate} cannot reach {place}: {error.text}", hint=hint)


def _no_agreement(label: str, hop: Hop, error: Exception, silent: bool, complaint: Callable[[], str]) -> Exception:
    """The error for a server with which greeting and key exchange failed. ``silent``: it keeps the line open."""
    text, place = str(error), f"{hop.host} port {hop.port}"
    if silent:
        return UnreachableError(
            f"{label}: {place} accepted the connection but did not greet within {hop.connect_timeout_s:g} s",
            hint="check the load of the machine, and that this is the port of sshd",
        )
    if "Indecipherable" in text or "Invalid SSH banner" in text:
        if _LIMIT_SAID.search(text):
            return TurnedAway(text)
        return UnreachableError(f"{label}: {place} is not an SSH server ({text})", hint="check the port")
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return PreflightError(f"{label}: {place}: no common algorithm: {text}", hint=f"check: ssh -v {hop.by_hand}")
    if said := complaint():
        if _LIMIT_SAID.search(said):
            return TurnedAway(said)
        return UnreachableError(f"{label}: {place}{said}", hint=f"check: ssh -v {hop.by_hand}")
    return TurnedAway(text)
