"""Tunnels kept by a supervisor, through real servers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.errors import PreflightError
from islandctl.fleet import node, supervisor, tunnel
from islandctl.fleet.connect import connect, this_machine
from islandctl.fleet.host import Host
from tests.fleet.test_supervisor import until
from tests.sshd import Sshd, free_port

pytestmark = pytest.mark.slow
LOCAL = this_machine()
ASK = """
import socket
def main(args, payload):
    with socket.create_connection(("127.0.0.1", args["port"]), timeout=10) as sock:
        return sock.makefile().readline()
"""


@pytest.fixture
def relay() -> Iterator[int]:
    """The port of something that greets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            with stream:
                stream.sendall(b"the relay\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    yield mark
    assert node.end_leftovers(LOCAL, mark, 0.0) == []


def begin(kept: tunnel.Tunnel) -> None:
    tunnel.open_tunnel(LOCAL, supervisor.__file__, sys.executable, kept)


def test_a_reverse_tunnel_comes_back_after_a_kill(
    sshd: Callable[..., Sshd], relay: int, mark: str, tmp_path: Path
) -> None:
    server = sshd()
    host = connect(server.site(), server.host, known_hosts=tmp_path / "kh", on_message=print)
    port = node.free_port(host)
    folder = tmp_path / "a run" / "tunnels" / "east-0"
    kept = tunnel.reverse_tunnel(
        server.host,
        server.site().ssh,
        run="test",
        mark=mark,
        folder=folder,
        known_hosts=tmp_path / "kh",
        host_port=port,
        local_port=relay,
    )
    try:
        begin(kept)
        tunnel.await_reverse(LOCAL, host, folder, port, 60)
        assert host.python(ASK, {"port": port}, timeout_s=20) == "the relay\n"
        child = node.state(LOCAL, str(folder)).child_pid
        os.kill(child, signal.SIGKILL)
        until(lambda: node.state(LOCAL, str(folder)).child_pid not in (None, child), "a new ssh")
        assert node.wait_port(host, port, timeout_s=15)
        until(lambda: _answers(host, port), "the relay's answer")
        assert node.state(LOCAL, str(folder)).restarts >= 1
        assert node.stop(LOCAL, str(folder), 20).outcome == "stopped"
    finally:
        host.close()


def _answers(host: Host, port: int) -> bool:
    try:
        return bool(host.python(ASK, {"port": port}, timeout_s=20) == "the relay\n")
    except Exception:
        return False


def test_a_forward_tunnel_through_a_jump_host_with_keys_of_the_run(
    sshd: Callable[..., Sshd], relay: int, mark: str, tmp_path: Path
) -> None:
    bastion, server = sshd(), sshd()
    known = tmp_path / "run" / "known_hosts"
    known.parent.mkdir()
    known.write_text(bastion.known_hosts_line() + server.known_hosts_line())
    for one in (bastion, server):
        one.known_hosts.write_text("")
    (tmp_path / "config").write_text(bastion.alias("gate") + server.alias("far", "ProxyJump gate"))
    ssh = server.site(hosts=["far"], config=str(tmp_path / "config"), identity=None, known_hosts=None).ssh
    port = free_port()
    folder = tmp_path / "tunnels" / "relay"
    kept = tunnel.forward_tunnel(
        "far", ssh, run="test", mark=mark, folder=folder, known_hosts=known, host_port=relay, local_port=port
    )
    begin(kept)
    assert node.wait_port(LOCAL, port, timeout_s=15), (folder / "logs" / "relay.log").read_text()
    assert LOCAL.python(ASK, {"port": port}, timeout_s=20) == "the relay\n"
    assert node.stop(LOCAL, str(folder), 20).outcome == "stopped"


def test_a_tunnel_refuses_an_unknown_host_key(
    sshd: Callable[..., Sshd], relay: int, mark: str, tmp_path: Path
) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    folder = tmp_path / "tunnels" / "east-0"
    settings: dict[str, Any] = {"run": "test", "mark": mark, "known_hosts": tmp_path / "kh"}
    kept = tunnel.reverse_tunnel(
        server.host, server.site().ssh, folder=folder, host_port=free_port(), local_port=relay, **settings
    )
    begin(kept)
    log = folder / "logs" / "east-0.log"
    until(lambda: log.exists() and "Host key verification failed" in log.read_text(), "ssh's complaint")
    assert node.stop(LOCAL, str(folder), 20).outcome == "stopped"


def test_a_server_that_allows_no_tunnel_is_told(
    sshd: Callable[..., Sshd], relay: int, mark: str, tmp_path: Path
) -> None:
    server = sshd(options=["AllowTcpForwarding no"])
    host = connect(server.site(), server.host, known_hosts=tmp_path / "kh", on_message=print)
    folder, port = tmp_path / "tunnels" / "east-0", free_port()
    settings: dict[str, Any] = {"run": "test", "mark": mark, "known_hosts": tmp_path / "kh"}
    try:
        begin(
            tunnel.reverse_tunnel(
                server.host, server.site().ssh, folder=folder, host_port=port, local_port=relay, **settings
            )
        )
        with pytest.raises(PreflightError, match="allows no tunnel to the relay") as caught:
            tunnel.await_reverse(LOCAL, host, folder, port, 60)
        assert f"remote port forwarding failed for listen port {port}" in caught.value.message
        assert "relay.address" in caught.value.hint
        assert node.stop(LOCAL, str(folder), 20).outcome == "stopped"
    finally:
        host.close()
