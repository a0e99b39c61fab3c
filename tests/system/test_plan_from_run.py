"""A tiny run on this machine, held against its own plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .local import Machine, as_planned, ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("exchange", [{"mode": "butterfly"}, {"warmup": 20}], ids=["pairs", "warm-up"])
def test_a_run_is_held_against_its_plan_and_planned_again(machine: Machine, exchange: dict[str, Any]) -> None:
    machine.changes = {"exchange": exchange}
    assert machine.launch(60, "seen").returncode == 0
    as_planned(machine, "seen")
    table = machine.islandctl("plan", "--from-run", "seen").stdout
    assert "sent a window" in table
    assert max(map(len, table.splitlines())) <= 100
    again = machine.islandctl("plan", "--from-run", "seen", "--set", "exchange.window=1000", "--json")
    assert again.returncode == 0, again.stderr
    made = json.loads(again.stdout)
    assert {one["step"]["formula"] for one in made["estimates"]} == {"measured.step of run seen"}
    assert made["totals"]["duration"]["value"] > 0
