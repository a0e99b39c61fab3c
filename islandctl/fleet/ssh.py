"""One SSH connection. The only module that knows paramiko.

paramiko carries the bytes; what an alias means comes from ``ssh -G`` (openssh.py), which keys are believed from the
known_hosts files (hostkeys.py). No pty is ever asked for: a command outlives the link it was started over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import paramiko
from paramiko.agent import AgentSSH
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import wire
from islandctl.fleet.host import Completed
from islandctl.fleet.hostkeys import HostKeys
from islandctl.fleet.openssh import Hop

# Without a handler, paramiko's background threads would write to the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

HANDSHAKES = 8
"""Logins at a time to one server; sshd begins to refuse at 10 that have not authenticated (MaxStartups)."""
SESSIONS = 8
"""Commands at a time over one connection; sshd's MaxSessions is 10."""
LOGIN_TRIES = 7
KEEPALIVE_S = 15
KEEPALIVE_COUNT = 3

_handshakes: dict[str, threading.BoundedSemaphore] = {}
_handshakes_lock = threading.Lock()


class _TurnedAway(Exception):
    """The server closed the connection before it greeted or agreed on keys: its login limit, most often."""


class Link:
    """One live connection. Safe from several threads."""

    def __init__(self, label: str, hop: Hop, transport: paramiko.Transport) -> None:
        self.label = label
        self.hop = hop
        self._transport = transport
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._opening = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the connection still stands, as far as this side knows."""
        return self._transport.is_active()

    def close(self) -> None:
        """End it."""
        self._transport.close()

    def run(self, command: str, stdin: bytes, timeout_s: float) -> Completed:
        """Run one command line in the login shell.

        Raises:
            TimeoutError: no end before the deadline.
            UnreachableError: the link was lost on the way; what the command did is unknown.
        """
        deadline = time.monotonic() + timeout_s
        with self._sessions:
            try:
                channel = self._session(timeout_s)
                with contextlib.closing(channel):
                    return self._converse(channel, command, stdin, deadline)
            except TimeoutError:
                raise
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise UnreachableError(
                    f"{self.label}: the SSH link was lost ({error or type(error).__name__}); state unknown",
                    hint="run the command again; what runs on the node is not affected",
                ) from error

    def _session(self, timeout_s: float) -> paramiko.Channel:
        """Open a session. A server at its MaxSessions refuses: commands given up may still run there for a while."""
        for attempt in Retrying(
            stop=stop_after_delay(timeout_s),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            retry=retry_if_exception_type(paramiko.ChannelException),
            reraise=True,
        ):
            # One at a time: paramiko keeps the reason of a refusal in one place for all threads.
            with attempt, self._opening:
                return self._transport.open_session(timeout=min(timeout_s, self.hop.connect_timeout_s))
        raise AssertionError("unreachable")

    def _converse(self, channel: paramiko.Channel, command: str, stdin: bytes, deadline: float) -> Completed:
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
            channel.sendall(stdin)
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

    def onward(self, label: str, hop: Hop) -> paramiko.Channel:
        """A stream to another server, as seen from this one."""
        try:
            return self._transport.open_channel(
                "direct-tcpip", (hop.host, hop.port), ("127.0.0.1", 0), timeout=hop.connect_timeout_s
            )
        except paramiko.ChannelException as error:
            if error.code == 1:
                raise PreflightError(
                    f"{label}: jump host {self.hop.alias} forwards no connections (AllowTcpForwarding no?)",
                    hint=f"ask its administrator, or check: ssh -W {hop.host}:{hop.port} {self.hop.alias}",
                ) from error
            raise UnreachableError(
                f"{label}: jump host {self.hop.alias} cannot reach {hop.host} port {hop.port}: {error.text}",
                hint=f"check: ssh -W {hop.host}:{hop.port} {self.hop.alias}",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise UnreachableError(
                f"{label}: jump host {self.hop.alias} gave no connection to {hop.host} port {hop.port}: {error}",
                hint=f"check: ssh -W {hop.host}:{hop.port} {self.hop.alias}",
            ) from error


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
                return _login_once(label, hop, host_keys, below)
    except RetryError as error:
        where = f"jump host {below.hop.alias} or {endpoint}" if below else endpoint
        raise UnreachableError(
            f"{label}: {where} closed the connection {LOGIN_TRIES} times before login (login limit, MaxStartups?)",
            hint=f"wait a little, then try again; or check: ssh -v {hop.alias}",
        ) from error
    raise AssertionError("unreachable")


def _login_once(label: str, hop: Hop, host_keys: HostKeys, below: Link | None) -> Link:
    known = host_keys.known(hop)
    sock, complaint = _stream(label, hop, below)
    try:
        transport = paramiko.Transport(sock)
        transport.banner_timeout = transport.auth_timeout = hop.connect_timeout_s
        options = transport.get_security_options()
        first = _algorithms([entry.kind for entry in known if not entry.marker])
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in first)
        _agree(label, hop, transport, complaint)
        key = transport.get_remote_server_key()
        host_keys.check(label, hop, known, key.get_name(), key.asbytes())
        _authenticate(label, hop, transport)
        transport.set_keepalive(KEEPALIVE_S)
        return Link(label, hop, transport)
    except BaseException:
        with contextlib.suppress(OSError, EOFError):
            transport.close()
        sock.close()
        raise


def _algorithms(kinds: list[str]) -> list[str]:
    """Host key algorithms for the kinds on file, so that the server shows a key that can be compared."""
    return [
        name for kind in kinds for name in ([kind, "rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind])
    ]


def _stream(label: str, hop: Hop, below: Link | None) -> tuple[socket.socket | paramiko.Channel, Callable[[], str]]:
    """The bytes to the server, and what a proxy command had to say when they stop."""
    if below is not None:
        return below.onward(label, hop), str
    if hop.proxy_command is not None:
        return _proxy(label, hop.proxy_command)
    place = f"{hop.host} port {hop.port}"
    try:
        sock = socket.create_connection((hop.host, hop.port), timeout=hop.connect_timeout_s)
    except socket.gaierror as error:
        raise UnreachableError(
            f"{label}: the name {hop.host} is not known ({error.strerror})",
            hint=f"check the spelling in the site profile, or: ssh -G {hop.alias} | grep hostname",
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
            f"{label}: {place}: {error.strerror or error}", hint=f"check: ssh {hop.alias}"
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


def _agree(label: str, hop: Hop, transport: paramiko.Transport, complaint: Callable[[], str]) -> None:
    """Greeting and key exchange."""
    began = time.monotonic()
    try:
        transport.start_client(timeout=hop.connect_timeout_s)
        if transport.initial_kex_done:
            return
        error: Exception = TimeoutError()
    except (paramiko.SSHException, EOFError, OSError) as caught:
        error = caught
    text = str(error)
    place = f"{hop.host} port {hop.port}"
    if isinstance(error, TimeoutError) or time.monotonic() - began >= hop.connect_timeout_s - 1:
        raise UnreachableError(
            f"{label}: {place} accepted the connection but did not greet within {hop.connect_timeout_s:g} s",
            hint="check the load of the machine, and that this is the port of sshd",
        ) from error
    if "Indecipherable" in text or "Invalid SSH banner" in text:
        if "not allowed at this time" in text.lower() or "exceeded" in text.lower():
            raise _TurnedAway(text) from error
        raise UnreachableError(f"{label}: {place} is not an SSH server ({text})", hint="check the port") from error
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        raise PreflightError(
            f"{label}: {place}: no common algorithm: {text}", hint=f"check: ssh -v {hop.alias}"
        ) from error
    if complaint():
        raise UnreachableError(f"{label}: {place}{complaint()}", hint=f"check: ssh -v {hop.alias}") from error
    raise _TurnedAway(text) from error


def _authenticate(label: str, hop: Hop, transport: paramiko.Transport) -> None:
    tried: list[str] = []
    with _agent(hop, tried) as in_agent:
        for name, key in _keys(hop, in_agent, tried):
            try:
                more = transport.auth_publickey(hop.user, key)
            except paramiko.BadAuthenticationType as error:
                tried.append(f"the server takes only {', '.join(error.allowed_types)}")
                break
            except (paramiko.SSHException, EOFError, OSError) as error:
                tried.append(f"{name} refused" if transport.is_active() else f"{name}: {error}")
                if not transport.is_active():
                    break
                continue
            if transport.is_authenticated():
                return
            tried.append(f"{name} accepted, but the server also wants {', '.join(more)}")
    raise PreflightError(
        f"{label}: login refused for {hop.endpoint}: {'; '.join(tried) or 'there is no key to offer'}",
        hint=f"check user and key (ssh.user, ssh.identity in the profile), or look at: ssh -v {hop.alias}",
    )


def _keys(hop: Hop, in_agent: Mapping[bytes, paramiko.PKey], tried: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys in OpenSSH's order: of the named files those that the agent holds, others of the agent, then the files."""
    offered: set[bytes] = set()
    for file in hop.identities:
        public = _public_part(file)
        if public is not None and public in in_agent:
            offered.add(public)
            yield f"{file} (agent)", in_agent[public]
    if not hop.identities_only:
        for public, key in in_agent.items():
            if public not in offered:
                yield f"agent key {key.get_name()}", key
    for file in hop.identities:
        if not os.path.isfile(file) or _public_part(file) in offered:
            continue
        try:
            yield file, paramiko.PKey.from_path(file)
        except (paramiko.PasswordRequiredException, TypeError):
            tried.append(f"{file} needs its passphrase (type: ssh-add {file})")
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
            tried.append(f"{file} cannot be read: {error}")


@contextlib.contextmanager
def _agent(hop: Hop, tried: list[str]) -> Iterator[Mapping[bytes, paramiko.PKey]]:
    """The keys in the agent, by their public part; it has to stay open while they sign."""
    agent = AgentSSH()
    keys: dict[bytes, paramiko.PKey] = {}
    with socket.socket(socket.AF_UNIX) as sock:
        if hop.agent is not None:
            try:
                sock.settimeout(5)
                sock.connect(hop.agent)
                agent._connect(sock)  # type: ignore[attr-defined]  # paramiko's own way in, for any socket
                keys = {key.asbytes(): key for key in agent.get_keys()}
            except (paramiko.SSHException, OSError) as error:
                tried.append(f"key agent {hop.agent}: {error}")
        yield keys


def _public_part(file: str) -> bytes | None:
    try:
        with open(file + ".pub") as public:
            return paramiko.pkey.PublicBlob.from_string(public.read()).key_blob
    except (OSError, ValueError):
        return None
