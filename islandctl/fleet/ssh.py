"""One SSH connection. The only module that knows fabric and paramiko.

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
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthSource, AuthStrategy, SourceResult
from paramiko.pkey import PublicBlob
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
from islandctl.fleet.openssh import KEEPALIVE_S, Hop
from islandctl.fleet.stream import open_stream

# Without a handler, paramiko's background threads would write to the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

HANDSHAKES = 8
"""Logins at a time to one server; sshd begins to refuse at 10 that have not authenticated (MaxStartups)."""
SESSIONS = 8
"""Commands at a time over one connection; sshd's MaxSessions is 10."""
LOGIN_TRIES = 7

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")

_handshakes: dict[str, threading.BoundedSemaphore] = {}
_handshakes_lock = threading.Lock()


class _TurnedAway(Exception):
    """The server closed the connection before it greeted or agreed on keys: its login limit, most often."""


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
        return UnreachableError(
            f"{self.label}: the SSH link was lost ({error or type(error).__name__}); state unknown",
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
    with _handshakes_lock:
        turn = _handshakes.setdefault(endpoint, threading.BoundedSemaphore(HANDSHAKES))
    try:
        for attempt in Retrying(
            stop=stop_after_attempt(LOGIN_TRIES),
            wait=wait_random_exponential(multiplier=0.2, max=8),
            retry=retry_if_exception_type(_TurnedAway),
        ):
            with attempt, turn:
                return _login(label, hop, host_keys, below)
    except RetryError as error:
        where = f"jump host {below.hop.alias} or {endpoint}" if below else endpoint
        raise UnreachableError(
            f"{label}: {where} closed the connection {LOGIN_TRIES} times before login (login limit, MaxStartups?)",
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
            "auth_strategy": _Keys(label, hop),
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

    def make(sock: socket.socket | paramiko.Channel, **settings: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **settings)
        options = transport.get_security_options()
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in first)
        transport.set_keepalive(KEEPALIVE_S)
        return transport

    return make


class _Believe(paramiko.MissingHostKeyPolicy):
    """The policy for host keys. paramiko's client is given none, so every server's key comes here."""

    def __init__(self, label: str, hop: Hop, host_keys: HostKeys, known: list[KnownKey]) -> None:
        self._check = functools.partial(host_keys.check, label, hop, known)

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises HostKeyError, or returns and so believes the key."""
        self._check(key.get_name(), key.asbytes())


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
        if "not allowed at this time" in text.lower() or "exceeded" in text.lower():
            return _TurnedAway(text)
        return UnreachableError(f"{label}: {place} is not an SSH server ({text})", hint="check the port")
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return PreflightError(f"{label}: {place}: no common algorithm: {text}", hint=f"check: ssh -v {hop.by_hand}")
    if said := complaint():
        return UnreachableError(f"{label}: {place}{said}", hint=f"check: ssh -v {hop.by_hand}")
    return _TurnedAway(text)


class _Keys(AuthStrategy):
    """Logs in with the user's keys, in OpenSSH's order, and says of each why it did not do."""

    def __init__(self, label: str, hop: Hop) -> None:
        self._label = label
        self._hop = hop
        self._tried: list[str] = []

    def get_sources(self) -> Iterator[AuthSource]:
        """Not used: keys come from an agent that has to stay open while they sign."""
        return iter(())

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Try key after key.

        Raises:
            PreflightError: none was accepted, or one was and the server wants more than keys.
            UnreachableError: the server stopped answering.
        """
        hop, tried = self._hop, self._tried
        with self._agent() as in_agent:
            for name, key in self._offers(in_agent):
                try:
                    more = transport.auth_publickey(hop.user, key)
                except paramiko.BadAuthenticationType as error:
                    tried.append(f"the server takes no keys, only {', '.join(error.allowed_types)}")
                    break
                except (paramiko.SSHException, EOFError, OSError) as error:
                    if "timeout" in str(error):
                        raise UnreachableError(
                            f"{self._label}: {hop.endpoint} did not answer a login in {hop.connect_timeout_s:g} s",
                            hint=f"check the load of the machine, or look at: ssh -v {hop.by_hand}",
                        ) from error
                    tried.append(f"{name} refused" if transport.is_active() else f"{name}: {error}")
                    if not transport.is_active():
                        break
                    continue
                if transport.is_authenticated():
                    return []
                if "publickey" not in more:
                    raise PreflightError(
                        f"{self._label}: {hop.endpoint} took {name}, but also wants a second factor "
                        f"({', '.join(more)}), which cannot be given here",
                        hint="ask for logins by key alone; a jump host can be opened by hand instead: ControlMaster "
                        f"and ControlPersist for it, ProxyCommand ssh -W %h:%p {hop.by_hand} for the hosts behind it",
                    )
                tried.append(f"{name} accepted, but the server wants another key too")
        raise PreflightError(
            f"{self._label}: login refused for {hop.endpoint}: {'; '.join(tried) or 'there is no key to offer'}",
            hint=f"check user and key (ssh.user, ssh.identity in the profile), or look at: ssh -v {hop.by_hand}",
        )

    def _offers(self, in_agent: Mapping[bytes, paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey]]:
        """Each key with its certificates, then the key alone: an outdated certificate must not hide it."""
        beside = [f"{file}-cert.pub" for file in self._hop.identities]
        certificates: list[tuple[str, PublicBlob]] = []
        for file in dict.fromkeys([*self._hop.certificates, *filter(os.path.isfile, beside)]):
            try:
                certificates.append((file, PublicBlob.from_file(file)))
            except (OSError, ValueError) as error:
                self._tried.append(f"certificate {file} cannot be read: {error}")
        for name, key in self._keys(in_agent):
            for file, certificate in certificates:
                if _certifies(certificate.key_blob, key.asbytes()):
                    key.public_blob = certificate
                    yield f"{name} with {file}", key
            key.public_blob = None
            yield name, key

    def _keys(self, in_agent: Mapping[bytes, paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey]]:
        """Of the named files those that the agent holds, others of the agent, then the files."""
        offered: set[bytes] = set()
        for file in self._hop.identities:
            public = _public_part(file)
            if public is not None and public in in_agent:
                offered.add(public)
                yield f"{file} (agent)", in_agent[public]
        if not self._hop.identities_only:
            for public, key in in_agent.items():
                if public not in offered:
                    yield f"agent key {key.get_name()}", key
        for file in self._hop.identities:
            if not os.path.isfile(file) or _public_part(file) in offered:
                continue
            try:
                yield file, paramiko.PKey.from_path(file)
            except (paramiko.PasswordRequiredException, TypeError):
                self._tried.append(f"{file} needs its passphrase (type: ssh-add {file})")
            except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
                self._tried.append(f"{file} cannot be read: {error}")

    @contextlib.contextmanager
    def _agent(self) -> Iterator[Mapping[bytes, paramiko.PKey]]:
        """The keys in the agent, by their public part; it has to stay open while they sign."""
        agent = AgentSSH()
        keys: dict[bytes, paramiko.PKey] = {}
        with socket.socket(socket.AF_UNIX) as sock:
            if self._hop.agent is not None:
                try:
                    sock.settimeout(5)
                    sock.connect(self._hop.agent)
                    agent._connect(sock)  # type: ignore[attr-defined]  # paramiko's own way in, for any socket
                    for key in agent.get_keys():
                        if "-cert-v01@" in key.get_name():
                            key.inner_key = None  # type: ignore[attr-defined]  # or paramiko shows the bare key under the certificate's name
                        keys[key.asbytes()] = key
                except (paramiko.SSHException, OSError) as error:
                    self._tried.append(f"key agent {self._hop.agent}: {error}")
            yield keys


def _certifies(certificate: bytes, key: bytes) -> bool:
    """Whether a certificate is this key's: after its type and a nonce it repeats the key's numbers."""
    whole, plain = paramiko.Message(certificate), paramiko.Message(key)
    for message, fields in ((whole, 2), (plain, 1)):
        for _ in range(fields):
            message.get_string()
    return whole.get_remainder().startswith(plain.get_remainder())


def _public_part(file: str) -> bytes | None:
    try:
        return PublicBlob.from_file(file + ".pub").key_blob
    except (OSError, ValueError):
        return None
