"""Which interface NCCL and gloo are told to use."""

from __future__ import annotations

import socket

import pytest

from islandctl.worker import interface


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_interface_with_the_way_there(host: str) -> None:
    assert interface.leads_to(host) == ("lo", host)


def test_an_interface_by_its_whole_name() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert "127.0.0.1" in interface.addresses("lo")
    assert all("127.0.0.1" not in interface.addresses(name) for name in names if name != "lo")
    assert interface.addresses("no-such-one") == []


def test_each_node_of_several_names_its_own() -> None:
    environ = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    interface.choose(environ)
    assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == ("=lo", "lo")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"},
        {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "::1", "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"},
    ],
)
def test_what_is_left_as_it_is(environ: dict[str, str]) -> None:
    before = dict(environ)
    interface.choose(environ)
    assert environ == before
