"""The way to a host, as OpenSSH's configuration describes it, against real servers."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.site import Ssh
from islandctl.errors import ConfigError, HostKeyError, PreflightError, UnreachableError
from islandctl.fleet.openssh import resolve
from tests.fleet.reaching import Start, hello, jump_config, reach, refused
from tests.sshd import namespaces_work, site_profile


def test_include_alias_and_odd_port(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d" / "east").write_text(server.alias("island-east"))
    (tmp_path / "config").write_text(f"Include {tmp_path}/config.d/*\n")
    settings = {"config": str(tmp_path / "config"), "identity": None, "known_hosts": None}
    assert hello(reach(server, name="island-east", **settings)) == b"hello\n"


def test_ipv6_with_brackets_and_port(sshd: Start) -> None:
    server = sshd(address="::1")
    assert server.host.endswith(f"@[::1]:{server.port}")
    assert hello(reach(server)) == b"hello\n"


def test_jump_through_another_server(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate") + server.alias("node.example.com") + "Host *.example.com\n  ProxyJump gate\n"
    settings = jump_config(tmp_path, text)
    assert hello(reach(server, name="node.example.com", **settings)) == b"hello\n"
    assert "Accepted publickey" in (bastion.folder / "sshd.log").read_text()


@pytest.mark.slow
def test_jump_through_two_servers(sshd: Start, tmp_path: Path) -> None:
    outer, inner, server = sshd(), sshd(address="::1"), sshd()
    text = outer.alias("outer") + inner.alias("inner") + server.alias("node", "ProxyJump outer,inner")
    settings = jump_config(tmp_path, text)
    assert [hop.alias for hop in resolve("node", server.site(hosts=["node"], **settings).ssh)] == [
        "outer",
        "inner",
        "node",
    ]
    assert hello(reach(server, name="node", **settings)) == b"hello\n"
    text = outer.alias("outer") + inner.alias("inner", "ProxyJump outer") + server.alias("node", "ProxyJump inner")
    assert hello(reach(server, name="node", **jump_config(tmp_path, text))) == b"hello\n"
    assert (outer.folder / "sshd.log").read_text().count("Accepted publickey") == 2
    inner.drop()
    error = refused(UnreachableError, server, name="node", **jump_config(tmp_path, text))
    assert error.message.startswith(f"east/node: jump host inner: jump host outer cannot reach ::1 port {inner.port}")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["none", "NONE"])
def test_proxyjump_none_is_no_host(sshd: Start, tmp_path: Path, word: str) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate.example.com", f"ProxyJump {word}") + server.alias("node.example.com")
    settings = jump_config(tmp_path, text + "Host *.example.com\n  ProxyJump gate.example.com\n")
    assert hello(reach(bastion, name="gate.example.com", **settings)) == b"hello\n"
    assert hello(reach(server, name="node.example.com", **settings)) == b"hello\n"


def test_the_family_of_addresses(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    text = server.alias("node", "HostKeyAlias that")
    text = text.replace("HostName 127.0.0.1", "HostName localhost")
    server.known_hosts.write_text(server.known_hosts_line() + server.known_hosts_line().replace("[", "that,[", 1))
    for family, answers in (("inet", True), ("inet6", False)):
        settings = jump_config(tmp_path, f"{text}  AddressFamily {family}\n  BindAddress 127.0.0.1\n")
        if answers:
            assert hello(reach(server, name="node", **settings)) == b"hello\n"
        else:
            refused(UnreachableError, server, name="node", **settings)


def test_what_is_typed_by_hand_goes_the_same_way(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate") + server.alias("node", "ProxyJump gate")
    settings = jump_config(tmp_path, text)
    gate, node = resolve("node", server.site(hosts=["node"], **settings).ssh)
    assert f"-F {tmp_path}/config" in node.by_hand
    assert (gate.by_hand.split()[-1], node.by_hand.split()[-1]) == ("gate", "node")
    server.known_hosts.write_text("")
    error = refused(HostKeyError, server, name="node", **settings)
    assert f"(or connect once by hand: ssh {node.by_hand};" in error.hint


def test_jumps_in_a_circle(sshd: Start, tmp_path: Path) -> None:
    settings = jump_config(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(ConfigError, match="ProxyJump leads in a circle: a → b → a"):
        resolve("a", site_profile("east", ["a"], settings, "~/w").ssh)


@pytest.mark.slow
def test_proxy_command(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    inner = f"ssh -F {tmp_path}/config -o BatchMode=yes -W %h:%p gate"
    settings = jump_config(tmp_path, bastion.alias("gate") + server.alias("node", f"ProxyCommand {inner}"))
    assert hello(reach(server, name="node", **settings)) == b"hello\n"
    settings = jump_config(tmp_path, server.alias("node", "ProxyCommand echo the gate is shut >&2; exit 1"))
    error = refused(UnreachableError, server, name="node", **settings)
    assert "the gate is shut" in error.message


@pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces; the ports above show the rest")
def test_a_server_in_a_network_namespace(sshd: Start) -> None:
    server = sshd(namespace=True)
    assert server.host.endswith(":22")
    host = reach(server)
    try:
        assert server.address.encode() in host.run(["ip", "-br", "address"], timeout_s=20).stdout
    finally:
        host.close()


def ways(text: str, tmp_path: Path, host: str = "node", **ssh: Any) -> list[Any]:
    (tmp_path / "config").write_text(text)
    return list(resolve(host, Ssh(config=str(tmp_path / "config"), **ssh)))


@pytest.mark.parametrize(
    ("host", "name", "port", "endpoint"),
    [
        ("::1", "::1", 22, "me@[::1]:22"),
        ("[::1]:2222", "[::1]:2222", 2222, "me@[::1]:2222"),
        ("u@[2001:DB8::1]:2222", "[2001:db8::1]:2222", 2222, "u@[2001:db8::1]:2222"),
        ("fe80::1%eth0", "fe80::1%eth0", 22, "me@[fe80::1%eth0]:22"),
        ("[fe80::1%eth0]:2222", "[fe80::1%eth0]:2222", 2222, "me@[fe80::1%eth0]:2222"),
        ("node:22013", "[node]:22013", 22013, "me@node:22013"),
    ],
)
def test_address_and_port_stay_together(tmp_path: Path, host: str, name: str, port: int, endpoint: str) -> None:
    (hop,) = ways("User me\n", tmp_path, host)
    assert (hop.host_key_name, hop.port, hop.endpoint.lower()) == (name, port, endpoint)
    assert f"-p {port}" in hop.by_hand or port == 22


def test_match_and_nested_include(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a").write_text(f'Include {tmp_path}/more/b\nMatch host node exec "true"\n  Port 2201\n')
    (tmp_path / "more" / "b").write_text('Match originalhost node !exec "false"\n  User deep\n')
    (hop,) = ways(f"Include {tmp_path}/more/a\nHost *\n  User shallow\n  Port 2202\n", tmp_path)
    assert hop.endpoint == "deep@node:2201"


def test_each_jump_is_resolved_with_its_own_jumps(tmp_path: Path) -> None:
    """The first of a list keeps its own ProxyJump, the others' are replaced by the list: as with OpenSSH."""
    text = (
        "Host node\n  ProxyJump inner,u@[::1]:2222,ssh://x@last:2223\n"
        "Host inner\n  ProxyJump outer\n  HostName 10.0.0.7\nHost outer\n  Port 2201\nHost last\n  ProxyJump outer\n"
        "Host *\n  User me\n"
    )
    endpoints = ["me@outer:2201", "me@10.0.0.7:22", "u@[::1]:2222", "x@last:2223", "me@node:22"]
    assert [hop.endpoint for hop in ways(text, tmp_path)] == endpoints


def test_jumps_that_are_addresses(tmp_path: Path) -> None:
    """``ssh -G`` writes ``[10.0.0.1]:2222`` for ``ProxyJump 10.0.0.1:2222``."""
    jumps = {
        "10.0.0.1": ("10.0.0.1", 22),
        "me@10.0.0.1:2222": ("10.0.0.1", 2222),
        "[gate.example.com]:2222": ("gate.example.com", 2222),
        "[::1]:2222": ("::1", 2222),
        "me@10.0.0.9,me@10.0.0.1:2222": ("10.0.0.1", 2222),
    }
    config = tmp_path / "config"
    for written, (host, port) in jumps.items():
        config.write_text(f"Host node\n  ProxyJump {written}\n")
        *_, jump, node = resolve("node", Ssh(config=str(config)))
        assert (jump.host, jump.port, node.alias) == (host, port, "node"), written


def test_what_is_for_the_host_is_not_for_its_jumps(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    text = "Host node\n  ProxyJump gate\nHost gate\n  User porter\n  IdentityFile ~/.ssh/gate\nHost *\n  User me\n"
    gate, node = ways(text, tmp_path, user="root", port=2222, identity=str(tmp_path / "key"))
    assert (gate.endpoint, node.endpoint) == ("porter@gate:22", "root@node:2222")
    assert str(tmp_path / "key") in node.identities
    assert str(tmp_path / "key") not in gate.identities


def test_names_of_files_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "/keys")
    monkeypatch.setenv("OTHER_AGENT", "/run/agent")
    text = (
        "HostName real.example\nUser u\nIdentityFile ${KEYS}/%r@%n-%h:%p%%\nIdentityFile none\n"
        "IdentityAgent $OTHER_AGENT\nCertificateFile ~/cert-%r\nIdentitiesOnly yes\nProxyCommand via %h %p %r %n\n"
    )
    (hop,) = ways(text, tmp_path)
    assert hop.identities == ("/keys/u@node-real.example:22%",)
    assert hop.certificates == (f"{Path(pwd.getpwuid(os.getuid()).pw_dir)}/cert-u",)
    assert (hop.agent, hop.identities_only) == ("/run/agent", True)
    assert hop.proxy_command == "via real.example 22 u node"
    monkeypatch.setenv("OTHER_AGENT", "")
    (hop,) = ways("IdentityAgent $OTHER_AGENT\n", tmp_path)
    assert hop.agent is None
    (hop,) = ways("IdentityAgent none\nProxyCommand none\n", tmp_path)
    assert (hop.agent, hop.proxy_command) == (None, None)


def test_several_known_hosts_files_with_spaces_in_their_names(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("known hosts", "other", "of the lab")]
    for file in files:
        file.write_text("")
    quoted = " ".join(f'"{file}"' for file in files)
    (hop,) = ways(f"UserKnownHostsFile {quoted}\nGlobalKnownHostsFile none\n", tmp_path)
    assert hop.known_hosts == tuple(map(str, files))


def test_a_key_file_that_is_not_there_is_named(sshd: Start, tmp_path: Path) -> None:
    server = sshd()
    server.identity = tmp_path / "nokey"
    settings = jump_config(tmp_path, server.alias("node", "IdentityAgent none"))
    error = refused(PreflightError, server, name="node", **settings)
    assert f"there is no key to offer; there is no {tmp_path}/nokey" in error.message
