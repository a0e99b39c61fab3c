"""Logins and links, and what is wrong with them, against real servers."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from fabric import Config, Connection

from islandctl.config.site import Ssh
from islandctl.errors import ConfigError, PreflightError, UnreachableError
from islandctl.fleet import ssh, ssh_keys
from islandctl.fleet.connect import Fleet
from islandctl.fleet.hostkeys import HostKeys
from islandctl.fleet.openssh import Hop, resolve
from tests.fleet.reaching import Start, certify, hello, jump_config, reach, refused
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
    """Also with only the public part of a key on disk, and with more keys than the server lets one try."""
    server = sshd(options=["MaxAuthTries 2"])
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            time.sleep(0.01)
        subprocess.run(["ssh-add", "-q", server.identity], check=True, capture_output=True)
        assert hello(reach(server, identity=None)) == b"hello\n"
        subprocess.run(["ssh-add", "-q", "-D"], check=True, capture_output=True)
        for key in (*(make_key(tmp_path / f"other-{n}") for n in range(3)), server.identity):
            subprocess.run(["ssh-add", "-q", key], check=True, capture_output=True)
        assert "IdentitiesOnly yes" in refused(PreflightError, server, identity=None).message
        server.identity.unlink()
        for name in ("client_key", "client_key.pub"):
            text = f"Host node\n  IdentitiesOnly yes\n  IdentityFile {server.folder / name}\n"
            text += f"  HostName 127.0.0.1\n  Port {server.port}\n  UserKnownHostsFile {server.known_hosts}\n"
            assert hello(reach(server, name="node", **jump_config(tmp_path, text))) == b"hello\n"
    finally:
        agent.terminate()
        agent.wait()


@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_private_key_file_tells_its_public_key(tmp_path: Path, passphrase: str) -> None:
    key = make_key(tmp_path / "key", passphrase=passphrase)
    beside = ssh_keys._public_part(str(key))
    key.with_suffix(".pub").unlink()
    assert ssh_keys._public_part(str(key)) == beside is not None


def test_a_key_that_others_may_read_is_not_used(server: Sshd, tmp_path: Path) -> None:
    """OpenSSH refuses it, and OpenSSH carries the tunnels."""
    key = make_key(tmp_path / "key")
    key.chmod(0o644)
    error = refused(PreflightError, server, identity=str(key))
    assert f"{key} may be read by others, so OpenSSH refuses it (type: chmod 600 {key})" in error.message


@pytest.mark.slow
def test_user_certificates(sshd: Start, tmp_path: Path) -> None:
    authority = make_key(tmp_path / "authority")
    server = sshd(options=[f"TrustedUserCAKeys {authority}.pub"])
    (server.folder / "authorized_keys").write_text("")
    assert f"{server.identity} refused" in refused(PreflightError, server).message
    certificate = certify(authority, server.identity, "-n", server.user, "-V", "20200101Z:20200201Z")
    told = f"{server.identity} with {certificate} (expired on 2020-02-01 00:00 UTC) refused"
    assert told in refused(PreflightError, server).message
    certify(authority, server.identity, "-n", server.user)
    assert hello(reach(server)) == b"hello\n"
    certificate.rename(tmp_path / "elsewhere.pub")
    settings = jump_config(tmp_path, server.alias("node", f"CertificateFile {tmp_path}/elsewhere.pub"))
    assert hello(reach(server, name="node", **settings)) == b"hello\n"


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


@pytest.mark.slow
def test_a_login_limit_that_stays_is_told_as_such(sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LOGIN_TRIES", 2)
    server = sshd(options=["MaxStartups 1"])
    with ExitStack() as somebody:
        while somebody.enter_context(socket.create_connection((server.address, server.port))).recv(4) != b"SSH-":
            time.sleep(0.05)  # the server has not noticed yet that the one before has gone
        error = refused(UnreachableError, server)
    place = f"127.0.0.1:{server.port}"
    assert f"{place} closed the connection 2 times before login (login limit, MaxStartups?)" in error.message


def test_eight_handshakes_at_a_time_go_through_a_jump_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate, *nodes = (resolve(f"me@10.0.0.{n}", Ssh(config="/dev/null"))[0] for n in range(17))
    together, most, now = threading.Barrier(8), 0, 0
    counting = threading.Lock()

    def handshake(label: str, hop: Hop, host_keys: HostKeys, below: ssh.Link | None) -> str:
        nonlocal most, now
        with counting:
            now += 1
            most = max(most, now)
        together.wait(60)  # eight can, or this breaks
        with counting:
            now -= 1
        return label

    monkeypatch.setattr(ssh, "_login", handshake)
    keys = HostKeys(tmp_path / "known_hosts", "strict", print)
    below = ssh.Link("east/gate", gate, Connection("10.0.0.0", config=Config(lazy=True)))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda hop: ssh.login(f"east/{hop.alias}", hop, keys, below), nodes))
    assert most == 8


@pytest.mark.slow
def test_logins_through_a_proxy_command_wait_for_their_turn_too(sshd: Start, tmp_path: Path) -> None:
    """Each ``ssh -W`` of a proxy command logs in to the jump host, which turns more than two at a time away."""
    bastion, server = sshd(options=["MaxStartups 2"]), sshd()
    names = [f"node-{n}" for n in range(5)]
    command = f"ProxyCommand ssh -F {tmp_path}/config -o BatchMode=yes -W %h:%p gate"
    settings = jump_config(tmp_path, bastion.alias("gate") + "".join(server.alias(name, command) for name in names))
    site = server.site(hosts=names, **settings)
    with Fleet(known_hosts=tmp_path / "known_hosts", on_message=print) as fleet:
        assert [verdict.error for verdict in fleet.open((site, name) for name in names)] == [None] * 5


@pytest.mark.slow
def test_a_slow_handshake_is_waited_for(server: Sshd) -> None:
    """As over a link of half a second: the whole takes several seconds, which is no sign of a dead node."""
    assert server.site().ssh.connect_timeout >= 15
    with delayed(server.port, 0.25) as port:
        settings = {"name": f"{server.user}@127.0.0.1:{port}", "host_keys": "accept-new"}
        assert hello(reach(server, **settings)) == b"hello\n"


@contextmanager
def delayed(port: int, delay_s: float) -> Iterator[int]:
    """A port that leads to another one on this machine; every piece of data comes later, in both directions."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                target.sendall(data)
        with suppress(OSError):  # also after a reset, or the other direction would wait for ever
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        here, _ = listener.accept()
        with here, socket.create_connection(("127.0.0.1", port)) as there:
            back = threading.Thread(target=carry, args=(there, here))
            back.start()
            carry(here, there)
            back.join()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    thread.join(60)
    listener.close()


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up(sshd: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still answers, and it stands behind a jump host that does: as after a laptop's sleep."""
    bastion, server = sshd(), sshd()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    with monkeypatch.context() as shorter:
        shorter.setattr(ssh, "KEEPALIVE_S", 1.0)
        host = reach(server, name="node", **settings)
    try:
        server.signal_sessions(signal.SIGSTOP)
        with pytest.raises(UnreachableError, match=r"the SSH link was lost \(no answer for 3 s\); state unknown"):
            host.run(["echo", "hello"], timeout_s=100)
        server.signal_sessions(signal.SIGCONT)
        assert hello(host) == b"hello\n"
    finally:
        host.close()


@pytest.mark.slow
def test_an_account_without_a_shell(sshd: Start) -> None:
    error = refused(PreflightError, sshd(login_shell="/usr/sbin/nologin"))
    assert "python3 gave no answer (exit code 1): This account is currently not available." in error.message


def test_a_server_that_wants_more_than_a_key(sshd: Start) -> None:
    server = sshd(options=["PasswordAuthentication yes", "AuthenticationMethods publickey,password"])
    error = refused(PreflightError, server)
    assert f"took {server.identity}, but also wants a second factor (password)" in error.message
    assert "ControlMaster" in error.hint


def test_a_server_that_shares_no_algorithm(sshd: Start) -> None:
    error = refused(PreflightError, sshd(options=["Ciphers chacha20-poly1305@openssh.com"]))
    assert "no common algorithm: " in error.message
