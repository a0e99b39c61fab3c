"""The budget as time: how long a plan may run."""

from __future__ import annotations

from islandctl.config.budget import Budget
from islandctl.config.units import seconds_text
from islandctl.errors import InfeasibleError
from islandctl.planner.plan import Finding, Plan

_NO_PRICE = "there is no price for every site, so the money cannot be turned into time"
_GIVE = "give price.gpu in every profile, or set budget.hours instead"


def budget_seconds(plan: Plan, budget: Budget) -> float | None:
    """Seconds that the run may take, by whichever limit is reached first; None: no limit.

    Money is divided by the upper end of the planned price, so that the sum is not passed where the price is a range.

    Raises:
        InfeasibleError: money is limited, and a site's price is not known.
    """
    limits = [] if budget.hours is None else [budget.hours]
    if budget.cost is not None:
        if plan.cost_per_hour is None or not plan.cost_per_hour.high:
            raise InfeasibleError(f"budget.cost: {_NO_PRICE}", hint=_GIVE)
        limits.append(budget.cost / plan.cost_per_hour.high * 3600)
    return min(limits, default=None)


def budget_finding(plan: Plan) -> Finding | None:
    """The budget against what the steps need."""
    try:
        allowed = budget_seconds(plan, plan.recipe.budget)
    except InfeasibleError as error:
        return Finding(level="fail", place="budget.cost", text=_NO_PRICE, hint=error.hint)
    if allowed is None:
        return None
    text = f"lasts {seconds_text(allowed)}"
    steps = [estimate.run_step.value for estimate in plan.estimates if estimate.run_step is not None]
    if not steps or len(steps) < len(plan.estimates):
        return Finding(level="ok", place="budget", text=f"{text}; what the steps need is unknown")
    need = plan.recipe.training.steps * max(steps)
    text = f"{text}; the steps alone need {seconds_text(need)}"
    hint = "the run will be stopped before its end: raise the budget, or plan fewer steps"
    return (
        Finding(level="warn", place="budget", text=text, hint=hint)
        if need > allowed
        else Finding(level="ok", place="budget", text=text)
    )
