"""Rent, expand or own: the sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.errors import UsageError
from islandctl.planner.change import Case
from islandctl.planner.compare import MONTH_HOURS, Compared
from islandctl.planner.make import compare_plans, make_plan

OWN = {"gpu": "30000 USD", "power": "1000 W", "power_price": "0.10 USD/kWh", "pue": 1.5, "admin_rate": "100 USD/h"}


@pytest.fixture
def compared(recipe: Any, site: Any) -> Any:
    def make(*names: str, share: float = 0.25, **changes: Any) -> Compared:
        sites = [site(name, **{"measured__step": "1 s", "price__gpu": "3 USD/h", **changes}) for name in names]
        return compare_plans([Case(recipe(), sites)], share)

    return make


def test_rent_is_the_plans_own_cost(compared: Any, recipe: Any, site: Any) -> None:
    told = compared("a", "b")
    (rent,) = told.ways
    plan = make_plan(recipe(), [site(name, measured__step="1 s", price__gpu="3 USD/h") for name in "ab"])
    assert plan.cost_per_hour is not None
    assert plan.totals.cost_per_billion_tokens is not None
    assert rent.used_usd_per_hour == plan.cost_per_hour.value == 2 * 16 * 3
    assert rent.continuous.usd_per_month == pytest.approx(96 * MONTH_HOURS)
    assert rent.continuous.usd_per_billion_tokens == pytest.approx(plan.totals.cost_per_billion_tokens.value)
    assert rent.seasonal.usd_per_month == pytest.approx(24 * MONTH_HOURS)
    assert (rent.way, rent.capital_usd, told.cheapest) == ("rent", 0, 0)


def test_owning_by_hand(compared: Any) -> None:
    told = compared("a", "b", purchase=OWN)
    rent, own = told.ways
    assert (rent.way, own.way) == ("rent", "own")
    assert own.capital_usd == 32 * 30_000
    assert own.written_off_usd_per_month == pytest.approx(32 * 30_000 / 48)
    load = 32 * 1.5 * 0.10  # US$ an hour under load
    assert own.fixed_usd_per_month == pytest.approx(2 * 40 * 100 + MONTH_HOURS * 0.25 * load)
    assert own.used_usd_per_hour == pytest.approx(0.75 * load)
    month = own.written_off_usd_per_month + 8000 + MONTH_HOURS * load
    assert own.continuous.usd_per_month == pytest.approx(month)
    saved = MONTH_HOURS * (96 - load) - 8000
    assert own.pays_after_months == pytest.approx(960_000 / saved)
    assert own.pays_after_months_seasonal is not None
    assert own.pays_after_months_seasonal > own.pays_after_months
    assert own.pays_from_use is not None
    at = own.pays_from_use * MONTH_HOURS
    assert at * rent.used_usd_per_hour == pytest.approx(
        own.written_off_usd_per_month + own.fixed_usd_per_month + at * own.used_usd_per_hour
    )
    assert told.cheapest == 1


def test_interest_and_resale_by_hand(compared: Any) -> None:
    """Each accelerator 30,000 US$ over 4 years, at 1 % a month, of which 20 % come back."""
    yearly = 1.01**12 - 1
    _, own = compared("a", "b", purchase={**OWN, "interest": yearly, "resale": "20 %"}).ways
    price, worth = 960_000.0, 0.0
    for month in range(1, 49):
        worth += own.written_off_usd_per_month / 1.01**month
    assert worth + 0.2 * price / 1.01**48 == pytest.approx(price)
    (saved,) = [MONTH_HOURS * (96 - 32 * 1.5 * 0.10) - 8000]
    owed, months = price, 0
    while owed > 0:
        owed, months = owed * 1.01 - saved, months + 1
    assert own.pays_after_months is not None
    assert months - 1 < own.pays_after_months <= months
    _, resold = compared("a", "b", purchase={**OWN, "resale": "20 %"}).ways
    assert resold.written_off_usd_per_month == pytest.approx(0.8 * price / 48)
    assert resold.pays_after_months == pytest.approx(price / saved)  # before the end nobody knows what they fetch
    _, never = compared("a", "b", purchase={**OWN, "interest": 0.9, "gpu": "2e6 USD"}).ways
    assert never.pays_after_months is None


def test_what_is_there_already_is_not_bought(compared: Any) -> None:
    _, own = compared("a", "b", purchase={**OWN, "owned": 12}).ways
    assert (own.way, own.capital_usd) == ("expand", 2 * 4 * 30_000)


def test_a_purchase_that_never_pays(compared: Any) -> None:
    _, own = compared("a", "b", purchase={**OWN, "gpu": "9e6 USD", "admin_hours": 9000}).ways
    assert (own.pays_after_months, own.pays_after_months_seasonal, own.pays_from_use) == (None, None, None)


def test_sets_are_held_against_one_another(recipe: Any, site: Any) -> None:
    dear = [site(name, measured__step="1 s", price__gpu="9 USD/h") for name in "ab"]
    cheap = [site("c", measured__step="1 s", price__gpu="2 USD/h")]
    small = [site("d", measured__step="1 s", price__gpu="1 USD/h", gpu__memory="1 GB")]
    told = compare_plans([Case(recipe(), sites) for sites in (dear, cheap, small)], 0.5)
    assert [way.sites for way in told.ways] == [("a", "b"), ("c",), ("d",)]
    assert [way.feasible for way in told.ways] == [True, True, False]
    assert told.cheapest == 1


def test_one_site_waits_for_nobody(recipe: Any, site: Any) -> None:
    """Whatever the recipe says of several cells: their pace, their warm-up."""
    priced = {"price__gpu": "3 USD/h"}
    sets = [[site("a", measured__step="1 s", **priced), site("b", measured__step="2 s", **priced)]]
    sets.append(sets[0][:1])
    several = recipe(exchange__pace="measured", exchange__pace_bound=3, exchange__warmup=50)
    told = compare_plans([Case(several, sites) for sites in sets], 0.25)
    assert [way.feasible for way in told.ways] == [True, True]


def test_without_any_price_there_is_nothing_to_compare(recipe: Any, site: Any) -> None:
    sites = [site(name, gpu__type="X1", gpu__memory="80 GB", gpu__bf16="100 TFLOP/s") for name in "ab"]
    with pytest.raises(UsageError, match="no site has a price"):
        compare_plans([Case(recipe(), sites)], 0.5)
    bought = [site(name, gpu__type="X1", gpu__memory="80 GB", gpu__bf16="1 TFLOP/s", purchase=OWN) for name in "ab"]
    told = compare_plans([Case(recipe(), bought)], 0.5)
    assert [way.way for way in told.ways] == ["own"]
    assert told.missing == ("a, b: renting is left out, a price is not known (price.gpu)",)
    no_power = {key: value for key, value in OWN.items() if key != "power"}
    unknown = [site(name, gpu__type="X1", gpu__memory="80 GB", purchase=no_power) for name in "ab"]
    with pytest.raises(UsageError, match="the power of X1 is not known"):
        compare_plans([Case(recipe(), unknown)], 0.5)
