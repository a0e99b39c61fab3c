from __future__ import annotations

from collections.abc import Callable
from typing import Any

from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.make import make_plan
from islandctl.planner.wan import Link
from islandctl.planner.warmup import warmup_finding

LINKS = {
    "a": Link(up_bytes_per_s=1e6, down_bytes_per_s=1e9, rtt_s=0.1, streams=4),
    "b": Link(up_bytes_per_s=1e9, down_bytes_per_s=2e6, rtt_s=0.1, streams=4),
    "c": Link(up_bytes_per_s=1e9, down_bytes_per_s=4e6, rtt_s=0.1, streams=4),
}


def test_the_model_goes_up_once_and_down_to_the_slowest(shipped: Callable[..., Any]) -> None:
    recipe = shipped("demo")[0].value
    sizes = fragment_sizes(recipe.decoder, recipe.exchange)
    assert warmup_finding(recipe, sizes, LINKS, [Estimate(2.0)]) is None  # type: ignore[list-item]
    exchange = recipe.exchange.model_copy(update={"warmup": 30})
    recipe = recipe.model_copy(update={"exchange": exchange})
    found = warmup_finding(recipe, sizes, LINKS, [Estimate(2.0)])  # type: ignore[list-item]
    assert found is not None
    size = 4 * sum(each.values for each in sizes)
    assert (found.level, found.place) == ("ok", "a")
    assert found.text.startswith("warm-up: the first 30 steps, 60 s, by a alone")
    assert found.text.endswith(f"goes to them once: {size / 1e6 + size / 2e6:.3g} s")


def test_steps_that_one_cell_trains_alone_are_counted_once(
    recipe: Callable[..., Any], site: Callable[..., Any]
) -> None:
    sites = [site(name="a"), site(name="b")]
    plain, warm = (
        make_plan(recipe(training__steps=100, exchange__warmup=steps), sites).totals.tokens for steps in (0, 30)
    )
    assert warm == plain * (200 - 30) / 200


class Estimate:
    """As much of a cell's estimate as is asked for."""

    def __init__(self, seconds: float) -> None:
        self.step = self
        self.value = seconds
