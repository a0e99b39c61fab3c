"""Plans of what nobody would build: no traceback, no NaN, no infinity."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from islandctl.errors import UsageError
from islandctl.planner.change import Case
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan

CHANGES = {
    "site.wan.bandwidth": ["1 bit/s", "1 kbit/s", "1 Gbit/s", "1 Pbit/s"],
    "site.wan.rtt": ["0 s", "1 us", "60 s"],
    "site.wan.window": ["1 B", "1 TB"],
    "site.gpu.bf16": ["1 FLOP/s", "1e24 FLOP/s"],
    "site.gpu.memory": ["1 B", "1000 PB"],
    "site.gpu.memory_rate": ["1 B/s", "1e20 B/s"],
    "site.measured.step": ["1 us", "30 d"],
    "site.storage.write": ["1 B/s", "1 PB/s"],
    "site.storage.free": ["1 B", "1000 PB"],
    "site.price.gpu": ["0 USD/h", "1e9 USD/h"],
    "site.failures.per_gpu": ["1 h", "1000000 d"],
    "site.network.bandwidth": ["1 bit/s", "1 Pbit/s"],
    "site.network.oversubscription": ["1", "1000"],
    "model.width": ["8", "1000000"],
    "model.hidden": ["8", "10000000"],
    "model.vocabulary": ["256", "10000000"],
    "training.sequence": ["2", "100000000"],
    "training.batch": ["16", "10000000"],
    "training.steps": ["1", "1000000000"],
    "training.recompute": ["none", "selective", "full"],
    "exchange.window": ["5", "50", "1000000000"],
    "exchange.overlap": ["0", "4"],
    "exchange.fragments": ["1", "4"],
    "exchange.codec": ["fp32", "int8"],
    "exchange.chunk": ["256", "1000000000"],
    "checkpoint.every": ["1", "1000000000"],
}


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def check(plan: Plan) -> None:
    assert all(math.isfinite(number) for number in numbers(plan.model_dump()))
    assert json.loads(plan.model_dump_json())["feasible"] is plan.feasible
    for estimate in plan.estimates:
        for _, figure in estimate:
            if hasattr(figure, "formula"):
                assert figure.low <= figure.value <= figure.high, figure


@pytest.fixture
def small(recipe: Any, site: Any) -> list[Any]:
    """A recipe and two sites, read once."""
    return [recipe(), site("a"), site("b")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_any_corner_can_be_planned_or_is_refused_in_words(data: st.DataObject, small: Any) -> None:
    case = Case(small[0], small[1:])
    chosen = data.draw(st.lists(st.sampled_from(sorted(CHANGES)), unique=True, min_size=1, max_size=6))
    try:
        for path in chosen:
            case = case.changed(path, data.draw(st.sampled_from(CHANGES[path])))
        plan = make_plan(case.recipe, case.sites)
    except UsageError:
        return  # exit code 2, in words
    check(plan)


@pytest.mark.parametrize("number", [3, 64, 65, 1000])
def test_many_sites_are_planned_together(number: int, recipe: Any, site: Any) -> None:
    one = site()
    many = [
        dataclasses.replace(one, value=one.value.model_copy(update={"name": f"s{index}"})) for index in range(number)
    ]
    plan = make_plan(recipe(), many)
    assert len(plan.estimates) == number
    check(plan)
