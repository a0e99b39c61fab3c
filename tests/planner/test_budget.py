"""Money and time to the seconds that a run may take."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.budget import Budget
from islandctl.errors import InfeasibleError
from islandctl.planner.budget import budget_finding, budget_seconds
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Figure, Plan


def plan(recipe: Any, site: Any, low: float | None = 2.0, high: float = 4.0, **changes: Any) -> Plan:
    made = make_plan(recipe(**changes), [site("a"), site("b")])
    price = None if low is None else Figure(value=low, low=low, high=high, unit="USD/h", formula="")
    return made.model_copy(update={"totals": made.totals.model_copy(update={"cost_per_hour": price})})


def test_the_limit_that_is_reached_first_counts_and_money_by_the_higher_price(recipe: Any, site: Any) -> None:
    made = plan(recipe, site)
    assert budget_seconds(made, Budget()) is None
    assert budget_seconds(made, Budget(hours="3 h")) == 10800  # type: ignore[arg-type]
    assert budget_seconds(made, Budget(cost="8 USD")) == 7200  # type: ignore[arg-type]
    assert budget_seconds(made, Budget(cost="8 USD", hours="1 h")) == 3600  # type: ignore[arg-type]


def test_money_without_a_price_is_refused(recipe: Any, site: Any) -> None:
    made = plan(recipe, site, low=None, budget={"cost": "8 USD"})
    with pytest.raises(InfeasibleError, match=r"budget\.cost: there is no price for every site"):
        budget_seconds(made, made.recipe.budget)
    finding = budget_finding(made)
    assert finding is not None
    assert (finding.level, finding.place) == ("fail", "budget.cost")
    assert "price.gpu" in finding.hint


def test_a_budget_shorter_than_the_steps_is_told(recipe: Any, site: Any) -> None:
    assert budget_finding(plan(recipe, site)) is None
    short, long = (
        budget_finding(plan(recipe, site, training__steps=10_000_000, budget={"hours": hours}))
        for hours in ("1 s", "3650 d")
    )
    assert short is not None
    assert long is not None
    assert (short.level, long.level) == ("warn", "ok")
    assert short.text.startswith("lasts 1 s; the steps alone need ")
