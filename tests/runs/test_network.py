"""Tunnels to the relay: opened side by side, however many nodes there are; each is recorded before it is opened."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from islandctl.config.site import SiteProfile
from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet.host import Host
from islandctl.fleet.local import LocalHost
from islandctl.planner.plan import NodePlan
from islandctl.runs import network, record
from islandctl.runs.reach import MAX_AT_WORK, Reach
from islandctl.runs.record import NodeRecord, RunRecord, TunnelRecord

from . import builders as make

NUM_NODES = 2 * MAX_AT_WORK


class Hosts(Reach):
    """As many hosts as asked for, all of them this machine."""

    def host(self, site: str, host: str) -> Host:
        return LocalHost(f"{site}/{host}")


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunRecord, Hosts]:
    """A run whose first cell has many hosts that are reached by SSH, with a relay here."""
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path))
    data = make.site("east").model_dump(mode="json", exclude_none=True)
    hosts = tuple(f"h{number}" for number in range(NUM_NODES))
    gpu = {"type": "cpu", "count": NUM_NODES, "per_node": 1}
    site = SiteProfile.model_validate({**data, "scheduler": "ssh", "hosts": hosts, "gpu": gpu})
    plan = make.plan()
    cell = plan.cells[0].model_copy(
        update={"nodes": tuple(NodePlan(index=at, host=host, num_ranks=1) for at, host in enumerate(hosts))}
    )
    plan = plan.model_copy(update={"sites": (site, plan.sites[1]), "cells": (cell, plan.cells[1])})
    made = record.create(plan, "many", launcher_pid=0)
    nodes = tuple(_node(at, host) for at, host in enumerate(hosts))
    first = make.record().cells[0].model_copy(update={"nodes": nodes})
    made = record.change(made, cells=(first, make.record().cells[1]), relay_url="https://127.0.0.1:1", relay_port=1)
    return made, Hosts(plan, "many", lambda _: None)


def _node(index: int, host: str) -> NodeRecord:
    there = make.record().cells[0].nodes[0]
    return there.model_copy(update={"index": index, "host": host, "site": "east"})


def test_tunnels_are_opened_side_by_side(launched: tuple[RunRecord, Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another they would wait for each other in vain, and a launch of hundreds of nodes for minutes."""
    made, reach = launched
    together = threading.Barrier(MAX_AT_WORK)
    at_work, most = [0], [0]
    guard = threading.Lock()

    def opened(now: RunRecord, _: Reach, way: TunnelRecord) -> None:
        assert way in record.load(now.run).tunnels
        with guard:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        together.wait(60)
        with guard:
            at_work[0] -= 1

    monkeypatch.setattr(network, "_start_tunnel", opened)
    monkeypatch.setattr(network.nodes, "free_port", lambda host: 1)
    now = network.start_tunnels(made, reach._plan, reach, lambda _: None)
    assert len({way.name for way in now.tunnels}) == NUM_NODES
    assert {node.relay_url for node in now.cells[0].nodes} == {"https://127.0.0.1:1"}
    assert most[0] == MAX_AT_WORK


def test_one_tunnel_that_cannot_be_opened_leaves_the_others(
    launched: tuple[RunRecord, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor goes on without these nodes; a launch, which needs all of them, is told which."""
    made, reach = launched

    def free_port(host: Host) -> int:
        if host.label == "east/h3":
            raise UnreachableError("east/h3: link lost")
        return 1

    def opened(now: RunRecord, _: Reach, way: TunnelRecord) -> None:
        if way.host == "h5":
            raise PreflightError("east/h5: no room for its log")

    monkeypatch.setattr(network, "_start_tunnel", opened)
    monkeypatch.setattr(network.nodes, "free_port", free_port)
    now, told = network.open_tunnels(made, reach._plan, reach, lambda _: None)
    errors = {one.item.host: one.error.message for one in told if one.error is not None}
    assert errors == {"h3": "east/h3: link lost", "h5": "east/h5: no room for its log"}
    assert [node.host for node in now.cells[0].nodes if not node.relay_url] == ["h3", "h5"]
    with pytest.raises(PreflightError, match=r"2 of 128 nodes: .*h3: link lost; .*h5: no room"):
        network.start_tunnels(made, reach._plan, reach, lambda _: None)
