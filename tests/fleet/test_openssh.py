"""The way to a host, as OpenSSH's configuration describes it, against real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.errors import ConfigError, HostKeyError, UnreachableError
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
    outer, inner, server = sshd(), sshd(), sshd()
    text = outer.alias("outer") + inner.alias("inner") + server.alias("node", "ProxyJump outer,inner")
    settings = jump_config(tmp_path, text)
    assert [hop.alias for hop in resolve("node", server.site(hosts=["node"], **settings).ssh)] == [
        "outer",
        "inner",
        "node",
    ]
    assert hello(reach(server, name="node", **settings)) == b"hello\n"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["none", "NONE"])
def test_proxyjump_none_is_no_host(sshd: Start, tmp_path: Path, word: str) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate.example.com", f"ProxyJump {word}") + server.alias("node.example.com")
    settings = jump_config(tmp_path, text + "Host *.example.com\n  ProxyJump gate.example.com\n")
    assert hello(reach(bastion, name="gate.example.com", **settings)) == b"hello\n"
    assert hello(reach(server, name="node.example.com", **settings)) == b"hello\n"


def test_what_is_typed_by_hand_goes_the_same_way(sshd: Start, tmp_path: Path) -> None:
    bastion, server = sshd(), sshd()
    text = bastion.alias("gate") + server.alias("node", "ProxyJump gate")
    settings = jump_config(tmp_path, text)
    gate, node = resolve("node", server.site(hosts=["node"], **settings).ssh)
    assert f"-F {tmp_path}/config" in node.by_hand
    assert (gate.by_hand.split()[-1], node.by_hand.split()[-1]) == ("gate", "node")
    server.known_hosts.write_text("")
    error = refused(HostKeyError, server, name="node", **settings)
    assert f"(ssh {node.by_hand})" in error.hint


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
