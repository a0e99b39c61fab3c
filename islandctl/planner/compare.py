"""Several sets of sites for one recipe, rented or owned: what each costs in use, and when a purchase pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from islandctl.config.load import Loaded
from islandctl.config.model import Model
from islandctl.config.site import Purchase, SiteProfile
from islandctl.errors import UsageError
from islandctl.planner.catalogue import accelerator
from islandctl.planner.change import Case
from islandctl.planner.plan import Plan

MONTH_HOURS = 365.25 * 24 / 12
HOST_SHARE = 0.3
"""Power of host, memory and network over that of the accelerator's board (assumption)."""
IDLE_SHARE = 0.25
"""Of the power under load that a machine takes which waits for work (assumption)."""


class Use(Model):
    """What a way costs when it is used for a share of all hours."""

    share: float
    usd_per_month: float
    usd_per_billion_tokens: float | None
    """None: the step time is unknown."""


class Way(Model):
    """One set of sites, rented or owned."""

    sites: tuple[str, ...]
    way: Literal["rent", "own", "expand"]
    """``expand``: some accelerators are owned already, the others are bought. Who has no ``purchase`` is rented."""
    feasible: bool
    binds: str
    """The weakest link."""
    tokens_per_s: float | None
    days_to_end: float | None
    """Of the recipe, used without a break."""
    capital_usd: float
    fixed_usd_per_month: float
    """Whether it is used or not: people, power of idle machines. Capital is not in it."""
    written_off_usd_per_month: float
    """Of the capital, with interest and less what the machines fetch at the end."""
    interest_usd_per_month: float
    """Of the first month, on the whole capital."""
    used_usd_per_hour: float
    """Beyond that while it is used: rent, egress, power."""
    continuous: Use
    seasonal: Use
    pays_after_months: float | None = None
    """Used continuously, until the capital is less than the rent saved; None: never, or nothing to compare with."""
    pays_after_months_seasonal: float | None = None
    pays_from_use: float | None = None
    """Share of the hours from which owning is cheaper than renting, with the capital written off; None: never."""


class Compared(Model):
    """All of them, and what they have in common."""

    seasonal_share: float
    ways: tuple[Way, ...]
    cheapest: int | None
    """Index of the feasible way with the least US$ for 10⁹ tokens, used continuously."""
    cheapest_seasonal: int | None
    missing: tuple[str, ...]
    """What could not be compared, and why."""


ALONE = (
    ("exchange.mode", "none"),
    ("exchange.pace", None),
    ("exchange.pace_bound", None),
    ("exchange.warmup", None),
)
"""What a recipe for several cells says otherwise for one by itself."""


def compare(sets: Sequence[Case], planned: Callable[[Case], Plan], seasonal_share: float) -> Compared:
    """Plan every set, and reckon up what it costs. One site by itself trains as one cell, without an exchange.

    Raises:
        UsageError: no set, or nothing has a price.
        ConfigError: see ``make_plan``.
    """
    ways: list[Way] = []
    missing: list[str] = []
    for given in sets:
        case = given.changed_together(ALONE) if len(given.sites) == 1 and not _many_cells(given) else given
        rent = _rent(case, planned, seasonal_share)
        names = ", ".join(site.value.name for site in case.sites)
        if rent is None:
            missing.append(f"{names}: renting is left out, a price is not known (price.gpu)")
        else:
            ways.append(rent)
        if any(site.value.purchase for site in case.sites):
            own = _own(case, planned, seasonal_share)
            if own is None:
                missing.append(f"{names}: owning is left out: a site has neither price.gpu nor purchase")
            else:
                ways.append(own if rent is None else _against(own, rent, seasonal_share))
    if not ways:
        raise UsageError(
            "nothing can be compared: no site has a price", hint="give price.gpu or purchase in the profiles"
        )
    return Compared(
        seasonal_share=seasonal_share,
        ways=tuple(ways),
        cheapest=_cheapest([way.continuous for way in ways], ways),
        cheapest_seasonal=_cheapest([way.seasonal for way in ways], ways),
        missing=tuple(missing),
    )


def _many_cells(case: Case) -> bool:
    cells = case.recipe.value.exchange.cells
    return cells is not None and cells > 1


def _cheapest(uses: Sequence[Use], ways: Sequence[Way]) -> int | None:
    priced = [
        (use.usd_per_billion_tokens, index)
        for index, (use, way) in enumerate(zip(uses, ways, strict=True))
        if way.feasible and use.usd_per_billion_tokens is not None
    ]
    return min(priced)[1] if priced else None


def _rent(case: Case, planned: Callable[[Case], Plan], share: float) -> Way | None:
    plan = planned(case)
    if plan.cost_per_hour is None:
        return None
    return _way(plan, "rent", share, used=plan.cost_per_hour.value)


def _own(case: Case, planned: Callable[[Case], Plan], share: float) -> Way | None:
    """Sites with a ``purchase`` cost no rent; their machines are burnt in, so they fail as Llama 3's did."""
    bought = [site for site in case.sites if site.value.purchase is not None]
    changes: list[tuple[str, object]] = []
    for site in bought:
        changes += [(f"{site.value.name}.price.gpu", "0 USD/h"), (f"{site.value.name}.failures.rented", False)]
    plan = planned(case.changed_together(changes))
    if plan.cost_per_hour is None:
        return None
    capital = written_off = fixed = power = interest = 0.0
    for site in bought:
        one = site.value.purchase
        assert one is not None
        price = one.gpu * (site.value.gpu.count - one.owned)
        load = _watts(site) * site.value.gpu.count / 1000 * one.pue * one.power_price
        capital, written_off = capital + price, written_off + monthly(price, one)
        interest += price * _a_month(one)
        fixed += one.admin_hours * one.admin_rate + MONTH_HOURS * IDLE_SHARE * load
        power += (1 - IDLE_SHARE) * load
    owned = any(site.value.purchase and site.value.purchase.owned for site in bought)
    return _way(
        plan, "expand" if owned else "own", share, used=plan.cost_per_hour.value + power, fixed=fixed,
        capital=capital, written_off=written_off, interest=interest,
    )  # fmt: skip


def _a_month(purchase: Purchase) -> float:
    """Interest of a month, as a share."""
    return float((1 + purchase.interest) ** (1 / 12) - 1)


def monthly(price: float, purchase: Purchase) -> float:
    """What is written off a month: equal sums over the years, with interest worth the price less the resale.

    Args:
        price: US$, paid at the beginning.
    """
    months, rate = 12 * purchase.years, _a_month(purchase)
    if rate == 0:
        return price * (1 - purchase.resale) / months
    left = purchase.resale * (1 + rate) ** -months
    return float(price * (1 - left) * rate / (1 - (1 + rate) ** -months))


def _watts(site: Loaded[SiteProfile]) -> float:
    purchase, known = site.value.purchase, accelerator(site).watts
    if purchase is not None and purchase.power is not None:
        return purchase.power
    if known is None:
        raise UsageError(
            f"{site.at('purchase')}: the power of {site.value.gpu.type} is not known",
            hint="give purchase.power in the profile",
        )
    return known * (1 + HOST_SHARE)


def _way(
    plan: Plan,
    way: Literal["rent", "own", "expand"],
    share: float,
    *,
    used: float,
    fixed: float = 0.0,
    capital: float = 0.0,
    written_off: float = 0.0,
    interest: float = 0.0,
) -> Way:
    speed, duration = plan.totals.tokens_per_s, plan.totals.duration
    tokens_per_s = None if speed is None else speed.value

    def use(of_hours: float) -> Use:
        month = written_off + fixed + MONTH_HOURS * of_hours * used
        tokens = None if tokens_per_s is None else tokens_per_s * 3600 * MONTH_HOURS * of_hours
        return Use(
            share=of_hours, usd_per_month=month, usd_per_billion_tokens=None if not tokens else month / tokens * 1e9
        )

    return Way(
        sites=tuple(site.name for site in plan.sites),
        way=way,
        feasible=plan.feasible,
        binds=plan.constraints[0].name if plan.constraints else "",
        tokens_per_s=tokens_per_s,
        days_to_end=None if duration is None else duration.value / 86_400,
        capital_usd=capital,
        fixed_usd_per_month=fixed,
        written_off_usd_per_month=written_off,
        interest_usd_per_month=interest,
        used_usd_per_hour=used,
        continuous=use(1.0),
        seasonal=use(share),
    )


def paid_back(capital: float, saved: float, interest: float) -> float | None:
    """Months until ``saved`` a month has paid the capital back with its interest (of the first month, on all of it).
    None: never."""
    if saved <= interest:
        return None
    if interest == 0:
        return capital / saved
    return -math.log1p(-interest / saved) / math.log1p(interest / capital)


def _against(own: Way, rent: Way, share: float) -> Way:
    """When the purchase pays against renting the same set."""
    cheaper_per_hour = rent.used_usd_per_hour - own.used_usd_per_hour

    def months(of_hours: float) -> float | None:
        saved = MONTH_HOURS * of_hours * cheaper_per_hour - own.fixed_usd_per_month
        return paid_back(own.capital_usd, saved, own.interest_usd_per_month)

    from_use = None
    if cheaper_per_hour > 0:
        from_use = (own.written_off_usd_per_month + own.fixed_usd_per_month) / (MONTH_HOURS * cheaper_per_hour)
    return own.model_copy(
        update={
            "pays_after_months": months(1.0),
            "pays_after_months_seasonal": months(share),
            "pays_from_use": from_use if from_use is not None and from_use <= 1 else None,
        }
    )
