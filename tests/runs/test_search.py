"""Where a run may have processes, and what names its mark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.paths import RunFolder
from islandctl.fleet.node import Remains
from islandctl.planner.plan import Plan
from islandctl.runs.record import CellRecord, KeptRecord, RunRecord, TunnelRecord
from islandctl.runs.search import (
    HERE,
    NO_ACCELERATOR,
    PORTS_FREE,
    Found,
    _resources,
    _traces,
    everywhere,
    mark_in_files,
    places,
)

from . import builders as make


def far_plan(**relay: Any) -> Plan:
    """The plan of two sites over SSH, ``east-1`` and ``west-1``."""
    made = make.plan()
    sites = [{**site.model_dump(), "scheduler": "ssh", "hosts": [f"{site.name}-1"]} for site in made.sites]
    cells = []
    for cell in made.cells:
        (node,) = cell.nodes
        host = node.model_copy(update={"host": f"{cell.site}-1"})
        cells.append(cell.model_copy(update={"nodes": (host,)}))
    recipe = made.recipe.model_copy(update={"relay": made.recipe.relay.model_copy(update=relay)})
    return Plan.model_validate({**dict(made), "recipe": recipe, "sites": tuple(sites), "cells": tuple(cells)})


def far_record(*, reached: bool, relay_host: str = "") -> RunRecord:
    """A record of that plan: workers started, or the launch cut short behind its relay."""
    url = "https://127.0.0.1:1" if reached else ""
    kept = KeptRecord(name="relay", host=relay_host, python="p", code="c", supervisor="s", folder="/r/node-0")

    def far(cell: CellRecord) -> CellRecord:
        (node,) = cell.nodes
        return cell.model_copy(
            update={"nodes": (node.model_copy(update={"host": f"{cell.site}-1", "relay_url": url}),)}
        )

    made = make.record(relay=kept, relay_url=url)
    return made.model_copy(update={"cells": tuple(map(far, made.cells))})


def test_a_host_on_which_nothing_was_started_is_not_asked() -> None:
    plan = far_plan()
    assert places(make.record(cells=(), phase="failed"), plan) == [("", "")]
    assert places(far_record(reached=False), plan) == [("", "")]
    assert places(far_record(reached=False, relay_host="hub"), plan) == [("", ""), ("", "hub")]
    assert places(far_record(reached=True), plan) == [("", ""), ("east", "east-1"), ("west", "west-1")]


def test_ports_of_relay_and_tunnels_are_known_where_they_were_listened_on() -> None:
    tunnels = (
        TunnelRecord(name="t", site="east", host="east-1", reverse=True, host_port=41001, local_port=41000),
        TunnelRecord(name="f", host="hub", reverse=False, host_port=41002, local_port=41003),
    )
    kept = KeptRecord(name="relay", host="", python="p", code="c", supervisor="s", folder="/r/node-0")
    record = far_record(reached=True).model_copy(
        update={"tunnels": tunnels, "relay": kept, "relay_url": "https://127.0.0.1:41000"}
    )
    assert _traces(record, HERE) == ([], [41003, 41000])
    assert _traces(record, ("east", "east-1")) == (["/data/runs/demo/east/node-0"], [41001])
    assert _traces(record, ("", "hub")) == ([], [41002])
    assert _traces(make.record(), HERE)[0] == ["/data/runs/demo/east/node-0", "/data/runs/demo/west/node-0"]


def test_what_else_is_proven_of_a_host_that_is_clean() -> None:
    clean = Remains(processes=(), ports=(41000,), taken=(), accelerators=None, held=())
    assert _resources(clean, worked=True) == [PORTS_FREE, NO_ACCELERATOR]
    assert _resources(clean, worked=False) == [PORTS_FREE]
    assert _resources(replace(clean, accelerators=8), worked=True)[1] == "the memory of its 8 accelerators is free"
    held = replace(clean, taken=("port 41000 is held by process 7 (x)",), accelerators=8, held=("accelerator 3: …",))
    assert _resources(held, worked=True) == ["port 41000 is held by process 7 (x)", "accelerator 3: …"]
    found = Found(run="demo", hosts=("here",), resources=(f"here: {PORTS_FREE}", "here: accelerator 3: …"))
    assert (found.exit_code, found.lines[1:]) == (0, ["here: accelerator 3: …"])


def test_a_site_that_lends_the_relay_its_host_is_searched_once() -> None:
    both = [("", ""), ("west", "west-1"), ("east", "east-1")]
    assert places(far_record(reached=True, relay_host="west-1"), far_plan(host="west-1")) == both
    assert everywhere(far_plan(host="west-1")) == both
    assert everywhere(far_plan()) == [("", ""), ("east", "east-1"), ("west", "west-1")]


def test_the_mark_is_found_without_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path))
    mark = "demo.0123456789abcdef"
    folder = RunFolder.of("demo")
    (folder.tunnels / "relay").mkdir(parents=True)
    assert mark_in_files("demo") == ""
    (folder.tunnels / "relay" / "job.json").write_text(f'{{"mark": "{mark}"}}')
    folder.record.write_text('{"mark": "other.0123456789abcdef"')
    assert mark_in_files("demo") == mark
    folder.record.write_text(f'{{"run": "demo", "mark": "{mark}", "cut off')
    (folder.tunnels / "relay" / "job.json").unlink()
    assert mark_in_files("demo") == mark
