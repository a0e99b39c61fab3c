"""Hosts in every form that people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config.host_address import Address, parse_address
from islandctl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1", Address(None, "node-1", None)),
        ("host.example:22013", Address(None, "host.example", 22013)),
        ("ubuntu@203.0.113.7", Address("ubuntu", "203.0.113.7", None)),
        ("ubuntu@203.0.113.7:22", Address("ubuntu", "203.0.113.7", 22)),
        ("::1", Address(None, "::1", None)),
        ("[::1]", Address(None, "::1", None)),
        ("[::1]:2222", Address(None, "::1", 2222)),
        ("u@[2001:db8::1]:2222", Address("u", "2001:db8::1", 2222)),
        ("u@2001:db8::1", Address("u", "2001:db8::1", None)),
        ("fe80::1%eth0", Address(None, "fe80::1%eth0", None)),
        ("[fe80::1%eth0]:2222", Address(None, "fe80::1%eth0", 2222)),
    ],
)
def test_forms(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "@host",
        "user@",
        "host:",
        "host:0",
        "host:65536",
        "host:ssh",
        "host:22:22",
        "[host]:22",
        "[::1",
        "[::1]2222",
        "[::1]:",
        "::1::2",
        "fe80::1%",
        "-oProxyCommand=sh",
        "-u@host",
        "ssh://host",
        "host;ls",
        "host$(ls)",
        "host\nother",
        "host:٢٢",
    ],
)
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="host '") as caught:
        parse_address(text)
    assert "[::1]:2222" in caught.value.hint


def test_brackets_only_where_they_belong() -> None:
    assert parse_address("[::1]:2222").bracketed == "[::1]"
    assert parse_address("u@host:22").bracketed == "host"
    assert not parse_address("host:22").is_ipv6


HOSTS = (
    st.from_regex(r"[a-z0-9_][a-z0-9._-]{0,30}", fullmatch=True)
    | st.ip_addresses(v=6).map(str)
    | st.ip_addresses(v=6).map(lambda address: f"{address}%eth0")
)


@given(st.none() | st.from_regex(r"[a-z_][a-z0-9._-]{0,9}", fullmatch=True), HOSTS, st.none() | st.integers(1, 65535))
def test_the_port_survives_every_round_trip(user: str | None, host: str, port: int | None) -> None:
    address = Address(user, host, port)
    assert parse_address(str(address)) == address
