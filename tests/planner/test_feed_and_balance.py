"""What feeds the accelerators, how unequal sites are balanced, and where the relay stands best."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from islandctl.config.exchange import Exchange
from islandctl.planner.balance import balanced
from islandctl.planner.make import make_plan
from islandctl.planner.plan import CellPlan, NodePlan, Plan


def said(plan: Plan, place: str, words: str) -> str:
    found = [one.text for one in plan.findings if one.place.startswith(place) and words in one.text]
    assert found, plan.findings
    return found[0]


def test_the_text_lies_in_memory_once_for_each_rank(recipe: Any, site: Any) -> None:
    sites = [site(name, measured__step="2 s", storage__read="4 GB/s") for name in "ab"]
    known = make_plan(recipe(data__paths=["/data"], data__size="40 GB"), sites)
    unknown = make_plan(recipe(data__paths=["/data"]), sites)
    for more, less in zip(known.estimates, unknown.estimates, strict=True):
        assert more.node_memory is not None
        assert less.node_memory is not None
        assert more.node_memory.value - less.node_memory.value == pytest.approx(8 * 40e9)
        assert more.node_memory.high - less.node_memory.high == pytest.approx(16 * 40e9)  # while it is read
        assert more.text_load is not None
        assert more.text_load.value == pytest.approx(16 * 40e9 / 4e9)
        assert more.text_load.low == pytest.approx(2 * 40e9 / 4e9)
        assert more.text_rate is not None
        assert more.text_rate.value == 16 * 32 / 2  # a byte a token
        assert (less.text, less.text_load) == (None, None)
    assert "of unknown size" in said(unknown, "a", "text")
    assert "8 × 37.3 GiB in a node's memory" in said(known, "a", "text")
    assert known.config_hash == unknown.config_hash


def test_text_that_a_node_cannot_hold_does_not_fit(recipe: Any, site: Any) -> None:
    plan = make_plan(recipe(data__paths=["/data"], data__size="100 GB"), [site("a"), site("b")])
    assert not plan.feasible
    assert plan.constraints[0].name == "memory of a node"


def test_a_rank_on_the_processor_holds_it_beside_the_model(shipped: Any) -> None:
    recipe, sites = shipped("demo", "local-a", "local-b")
    plan = make_plan(recipe, sites)
    assert plan.estimates[0].text is not None
    assert plan.estimates[0].text.value == pytest.approx(12e6)
    assert plan.estimates[0].text_rate is None


def cells(*ranks: int) -> list[CellPlan]:
    return [
        CellPlan(index=index, name=f"c{index}", site=f"c{index}", nodes=(NodePlan(index=0, host="", num_ranks=num),))
        for index, num in enumerate(ranks)
    ]


def test_steps_that_let_cells_end_a_window_together() -> None:
    made, steps = cells(4, 4, 8), [1.0, 2.0, 1.5]
    shares = balanced(made, steps, Exchange())
    for share, seconds in zip(shares, steps, strict=True):
        assert share.steps * seconds == pytest.approx(shares[0].steps * steps[0], rel=0.05)
    assert balanced(made, [1.0, 1.1, 1.15], Exchange()) == ()
    assert balanced(made, steps, Exchange(mode="butterfly")) == ()  # there nobody can have steps of his own


def test_unequal_sites_are_told_how_to_balance(recipe: Any, site: Any) -> None:
    big = recipe(model__width=4096, model__layers=24, model__heads=32, model__hidden=4096, training__batch=64,
                 training__sequence=2048)  # fmt: skip
    sites = [site("fast", gpu__type="B200"), site("slow", gpu__type="A100-SXM-80")]
    plan = make_plan(big, sites)
    fast, slow = plan.balance
    assert fast.steps > 50 > slow.steps
    assert "with steps of their own, fast " in said(plan, "balance", "exchange.pace: measured")
    assert make_plan(big, [site("one"), site("two")]).balance == ()


def test_the_relay_stands_best_in_the_middle(recipe: Any, site: Any) -> None:
    rtt = {"wan__rtt": "200 ms", "wan__window": "1 GiB"}
    ends = [site(name, wan__to={"mid": "60 ms"}, **rtt) for name in ("east", "west")]
    plan = make_plan(recipe(), [*ends, site("mid", **rtt)])
    assert plan.relay_places[0].place == "mid"
    assert not plan.relay_places[0].bounded
    assert plan.relay_places[0].round_s == pytest.approx(2.5 * 0.06, rel=0.05)
    assert next(one for one in plan.relay_places if one.place == "east").bounded
    hints = [one.hint for one in plan.findings if one.place == "relay"]
    assert "set relay.host to a host of mid" in hints


def test_a_thin_line_is_no_place_for_a_relay(recipe: Any, site: Any) -> None:
    big = recipe(model__width=1024, model__layers=12, model__heads=16, model__hidden=1024)
    near = {"wan__to": dict.fromkeys("abc", "1 ms"), "wan__rtt": "50 ms", "wan__window": "1 GiB"}
    thin, *wide = site("a", wan__up="100 Mbit/s", **near), site("b", **near), site("c", **near)
    places = [one.place for one in make_plan(big, [thin, *wide]).relay_places]
    assert places.index("a") > places.index("b")


def test_no_place_is_told_where_nothing_passes_a_relay(recipe: Any, site: Any, shipped: Any) -> None:
    assert make_plan(recipe(exchange__mode="none"), [site()]).relay_places == ()
    assert make_plan(*shipped("demo", "local-a", "local-b")).relay_places == ()
    for first, second in itertools.pairwise(make_plan(recipe(), [site("a"), site("b")]).relay_places):
        assert first.round_s <= second.round_s
