"""Logins and links, and what is wrong with them, against real servers."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from islandctl.errors import ConfigError, PreflightError, UnreachableError
from islandctl.fleet.connect import Fleet
from tests.fleet.reaching import Start, hello, jump_config, reach, refused
from tests.sshd import Sshd, free_port, make_key


def test_a_key_that_is_not_accepted(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    stranger = make_key(tmp_path / "stranger")
    error = refused(PreflightError, server, identity=str(stranger))
    assert f"login refused for {server.user}@127.0.0.1:{server.port}: " in error.message
    assert f"{stranger} refused" in error.message
    assert "ssh -v" in error.hint


@pytest.mark.slow
def test_a_key_with_a_passphrase_says_what_to_type(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    locked = make_key(tmp_path / "locked", passphrase="secret")
    error = refused(PreflightError, server, identity=str(locked))
    assert f"{locked} needs its passphrase (type: ssh-add {locked})" in error.message


def test_a_missing_identity_file_is_named(sshd: Start) -> None:
    server = sshd()
    with pytest.raises(ConfigError, match=r"ssh\.identity: there is no file /no/such/key"):
        reach(server, identity="/no/such/key")


@pytest.mark.slow
def test_an_agent_is_used(sshd: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = sshd()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            time.sleep(0.01)
        subprocess.run(["ssh-add", "-q", server.identity], check=True, capture_output=True)
        assert hello(reach(server, identity=None)) == b"hello\n"
    finally:
        agent.terminate()
        agent.wait()


def test_a_wrong_port(server: Sshd) -> None:
    port = free_port()
    error = refused(UnreachableError, server, name=f"{server.user}@127.0.0.1:{port}")
    assert f"127.0.0.1 port {port} refused the connection" in error.message


def test_a_host_that_does_not_exist(server: Sshd) -> None:
    error = refused(UnreachableError, server, name="no-such-host.invalid")
    assert "the name no-such-host.invalid is not known" in error.message


@pytest.mark.slow
def test_a_port_that_never_greets(server: Sshd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = refused(
            UnreachableError, server, name=f"x@127.0.0.1:{silent.getsockname()[1]}", connect_timeout="1 s"
        )
    assert "did not greet within 1 s" in error.message


@pytest.mark.slow
def test_a_port_that_is_no_ssh_server(server: Sshd) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            stream, _ = other.accept()
            with stream:
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 101)
                stream.settimeout(5)
                stream.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        error = refused(UnreachableError, server, name=f"x@127.0.0.1:{other.getsockname()[1]}")
        thread.join(10)
    assert "is not an SSH server" in error.message


@pytest.mark.slow
def test_a_jump_host_that_forwards_nothing(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(options=["AllowTcpForwarding no"]), sshd()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    error = refused(PreflightError, server, name="node", **settings)
    assert "jump host gate forwards no connections" in error.message


@pytest.mark.slow
def test_a_target_that_the_jump_host_cannot_reach(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    server.stop()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    error = refused(UnreachableError, server, name="node", **settings)
    assert f"jump host gate cannot reach 127.0.0.1 port {server.port}" in error.message


@pytest.mark.slow
def test_a_login_limit_is_waited_out(sshd: Start, tmp_path: Path) -> None:
    """MaxStartups 2: more than two logins at a time are turned away; twelve at once still come up."""
    server = sshd(options=["MaxStartups 2"])
    site = server.site()
    fleets = [Fleet(known_hosts=tmp_path / "known_hosts", on_message=print) for _ in range(12)]
    try:
        with ThreadPoolExecutor(12) as pool:
            verdicts = list(pool.map(lambda fleet: fleet.open([(site, server.host)])[0], fleets))
        assert [verdict.error for verdict in verdicts] == [None] * 12
    finally:
        for fleet in fleets:
            fleet.close()


@pytest.mark.slow
def test_a_fleet_gives_a_verdict_for_each_host_and_one_login_to_the_bastion(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    names = [f"node-{n}" for n in range(6)]
    text = bastion.alias("gate") + "".join(server.alias(name, "ProxyJump gate") for name in names)
    settings = jump_config(tmp_path, text + "Host gone\n  HostName gone.invalid\n")
    site = server.site(hosts=[*names, "gone"], **settings)
    with Fleet(known_hosts=tmp_path / "known_hosts", on_message=print) as fleet:
        verdicts = fleet.open((site, name) for name in site.hosts)
        assert [verdict.error is None for verdict in verdicts] == [True] * 6 + [False]
        assert "gone.invalid" in str(verdicts[-1].error)
        assert fleet.host(site, "node-3").run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
    assert (bastion.folder / "sshd.log").read_text().count("Accepted publickey") == 1
