"""Which host keys are believed, against real servers."""

from __future__ import annotations

import base64
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paramiko.pkey import PKey, PublicBlob

from islandctl.config.site import Ssh
from islandctl.errors import HostKeyError
from islandctl.fleet import hostkeys, ssh_keys
from islandctl.fleet.hostkeys import Ask, HostKeys
from islandctl.fleet.openssh import resolve
from tests.fleet.reaching import Start, certify, hello, jump_config, reach, refused
from tests.sshd import make_key


@pytest.mark.parametrize("policy", ["strict", "ask"])
def test_an_unknown_key_stops_where_nobody_is_asked(sshd: Start, policy: str) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    error = refused(HostKeyError, server, host_keys=policy)
    key = subprocess.run(
        ["ssh-keygen", "-lf", server.folder / "host_key.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert f"the host key of [127.0.0.1]:{server.port} is unknown: it shows ssh-ed25519 {key}" in error.message
    assert "accept-new" in error.hint
    assert f" -p {server.port} " in error.hint
    assert not (server.folder / "run" / "known_hosts").exists()
    command = error.hint.partition("; then: ")[2].partition(" (or ")[0]
    subprocess.run(command, shell=True, check=True)
    assert server.known_hosts.read_text() == server.known_hosts_line()
    assert hello(reach(server, host_keys=policy)) == b"hello\n"


def test_first_contact_asks_with_the_fingerprint(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    questions: list[str] = []

    def answers(yes: bool) -> Ask:
        return lambda question: questions.append(question) or yes  # type: ignore[func-returns-value]

    error = refused(HostKeyError, server, host_keys="ask", ask=answers(False))
    assert "which was not accepted" in error.message
    refused(HostKeyError, server, host_keys="strict", ask=answers(True))
    assert hello(reach(server, host_keys="ask", ask=answers(True))) == b"hello\n"
    assert hello(reach(server, host_keys="ask")) == b"hello\n"
    assert len(questions) == 2
    (server.folder / "run" / "known_hosts").unlink()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: hello(reach(server, host_keys="ask", ask=answers(True))), range(3)))
    assert len(questions) == 3
    assert re.search(r"east/\S+: the host key of \S+ is unknown: it shows ssh-ed25519 SHA256:\S{43}\.", questions[0])
    assert server.known_hosts.read_text() == ""  # kept in a file of our own; the user's are not touched


def test_accept_new_keeps_and_tells_the_key_once(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text("")
    messages: list[str] = []
    for _ in range(2):
        assert hello(reach(server, messages, host_keys="accept-new")) == b"hello\n"
    assert len(messages) == 1
    assert re.search(r"is new, accepted and kept in .*/run/known_hosts: ssh-ed25519 SHA256:\S{43}$", messages[0])
    assert (server.folder / "run" / "known_hosts").read_text() == server.known_hosts_line()
    assert hello(reach(server)) == b"hello\n"  # strict now finds it in our own file


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_changed_key_stops_and_the_command_accepts_it(sshd: Start, policy: str) -> None:
    server = sshd()
    server.known_hosts.write_text(f"# a comment\n{server.known_hosts_line()}")
    server.stop()
    server.new_host_key()
    server.start()
    error = refused(HostKeyError, server, host_keys=policy)
    assert "has changed: it shows ssh-ed25519 SHA256:" in error.message
    assert f"{server.known_hosts}:2 holds" in error.message
    command = error.hint.partition(": ")[2]
    assert command.startswith(f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {server.known_hosts} && echo ")
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert server.known_hosts.read_text() == f"# a comment\n{server.known_hosts_line()}"
    assert hello(reach(server, host_keys="strict")) == b"hello\n"


@pytest.mark.slow
def test_a_key_of_another_kind_is_a_changed_key(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    other = make_key(tmp_path / "ecdsa", "ecdsa").with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {' '.join(other)}\n")
    assert "has changed" in refused(HostKeyError, server, host_keys="accept-new").message


@pytest.mark.slow
def test_hashed_names_patterns_and_lines_without_port(sshd: Start) -> None:
    server = sshd()
    subprocess.run(["ssh-keygen", "-H", "-f", server.known_hosts], check=True, capture_output=True)
    assert server.known_hosts.read_text().startswith("|1|")
    assert hello(reach(server)) == b"hello\n"
    key = " ".join((server.folder / "host_key.pub").read_text().split()[:2])
    for names in (f"[127.0.0.*]:{server.port}", "127.0.0.1"):
        server.known_hosts.write_text(f"{names} {key}\n")
        assert hello(reach(server)) == b"hello\n"
    # Another port is often another container: the key that is on file for port 22 says nothing about it.
    other = make_key(server.folder / "other").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"127.0.0.1 {other}")
    assert "is unknown" in refused(HostKeyError, server).message


@pytest.mark.slow
def test_a_revoked_key_stops(sshd: Start) -> None:
    server = sshd()
    server.known_hosts.write_text(f"@revoked {server.known_hosts_line()}")
    assert "is revoked by" in refused(HostKeyError, server, host_keys="accept-new").message
    server.remember()
    public, revoked = server.folder / "host_key.pub", server.folder / "revoked"
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, public], check=True)
    config = server.folder / "config"
    config.write_text(f"RevokedHostKeys {revoked}\n")
    assert "(RevokedHostKeys)" in refused(HostKeyError, server, config=str(config)).message
    revoked.write_text(f"# none\n{public.read_text()}")
    assert "(RevokedHostKeys)" in refused(HostKeyError, server, config=str(config)).message
    revoked.write_text(make_key(server.folder / "other").with_suffix(".pub").read_text())
    assert hello(reach(server, config=str(config))) == b"hello\n"


@pytest.mark.slow
def test_host_key_alias(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    key = " ".join((server.folder / "host_key.pub").read_text().split()[:2])
    server.known_hosts.write_text(f"rented-7 {key}\n")
    settings = jump_config(tmp_path, server.alias("node", "HostKeyAlias rented-7"))
    assert hello(reach(server, name="node", **settings)) == b"hello\n"


@pytest.mark.slow
def test_the_key_of_a_jump_host_is_enforced_too(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", "ProxyJump gate"))
    bastion.known_hosts.write_text(server.known_hosts_line().replace(str(server.port), str(bastion.port)))
    error = refused(HostKeyError, server, name="node", **settings)
    assert error.message.startswith("east/node: jump host gate: the host key of")
    assert "has changed" in error.message


@pytest.mark.slow
def test_a_host_certificate_of_a_known_authority_is_believed(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    authority = make_key(tmp_path / "authority", "ecdsa")
    server.stop()
    certificate = certify(authority, server.folder / "host_key", "-h", "-n", "127.0.0.1")
    with (server.folder / "sshd_config").open("a") as config:
        config.write(f"HostCertificate {certificate}\n")
    server.start()
    public = " ".join(authority.with_suffix(".pub").read_text().split()[:2])
    server.known_hosts.write_text(f"@cert-authority 127.0.0.* {public}\n")
    assert hello(reach(server)) == b"hello\n"
    server.known_hosts.write_text(f"@cert-authority * {public}\n@revoked * {public}\n")
    assert "is revoked by" in refused(HostKeyError, server).message
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"@cert-authority * {other}")
    assert "is unknown" in refused(HostKeyError, server).message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-h", "-n", "127.0.0.1"], ""),
        (["-h"], ""),
        (["-h", "-n", "other,127.0.0.?"], ""),
        (["-h", "-n", "127.0.0.2"], "that is for 127.0.0.2"),
        (["-n", "127.0.0.1"], "that is for a user, not for a host"),
        (["-h", "-V", "20200101Z:20200201Z"], "that expired on 2020-02-01 00:00 UTC"),
        (["-h", "-V", "21200101Z:21200201Z"], "that is not valid before 2120-01-01 00:00 UTC"),
    ],
)
def test_what_a_host_certificate_must_say(tmp_path: Path, options: list[str], told: str) -> None:
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "key")
    file = certify(authority, key, *options)
    (tmp_path / "known_hosts").write_text(f"@cert-authority 127.0.0.1 {authority.with_suffix('.pub').read_text()}")
    (hop,) = resolve("127.0.0.1", Ssh(config="/dev/null", known_hosts=str(tmp_path / "known_hosts")))
    host_keys = HostKeys(tmp_path / "own", "strict", print)
    blob = PublicBlob.from_file(str(file))
    server_s = PKey.from_path(key)
    server_s.public_blob = blob
    shown = ssh_keys.shown(server_s)
    assert shown.certificate is not None
    if not told:
        host_keys.check("east", hop, host_keys.known(hop), shown)
        blob.key_blob = blob.key_blob[:-1] + bytes([blob.key_blob[-1] ^ 1])  # a signature that is not right
        assert ssh_keys.shown(server_s).certificate is None
        told = "is unknown"
        shown = ssh_keys.shown(server_s)
    with pytest.raises(HostKeyError, match=told):
        host_keys.check("east", hop, host_keys.known(hop), shown)


def test_fingerprint_is_openssh_s(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key").with_suffix(".pub")
    shown = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    assert hostkeys.fingerprint(base64.b64decode(public.read_text().split()[1])) in shown
