"""What the planner can plan and ``launch`` cannot run yet.

A mode of the exchange that is not built makes the plan infeasible. A site under Slurm does not: whether the model
trains there is a question of its own, and the plan answers it; it only says that ``launch`` will refuse.
"""

from __future__ import annotations

from typing import Literal

from islandctl.planner.plan import Finding, Plan

_TEXT = "launch does not run this yet"


def not_yet(plan: Plan) -> list[Finding]:
    """One finding for everything in the plan that ``launch`` must refuse. Empty: it can be launched."""
    exchange = plan.recipe.exchange
    findings = []
    if exchange.mode == "butterfly":
        findings.append(_finding("exchange.mode: butterfly", "two-site and none run"))
    if exchange.apply == "blend":
        findings.append(_finding("exchange.apply: blend", "set exchange.apply: carry"))
    if exchange.when == "arrival":
        findings.append(_finding("exchange.when: arrival", "set exchange.when: fixed"))
    if len({cell.site for cell in plan.cells}) < len(plan.cells) and exchange.mode != "butterfly":
        place = f"exchange.cells: {exchange.cells} (several on one site)"
        findings.append(_finding(place, "leave exchange.cells out: one cell a site"))
    findings += [
        _finding(f"site {site.name}: scheduler: slurm", "schedulers local and ssh run", level="warn")
        for site in plan.sites
        if site.scheduler == "slurm"
    ]
    return findings


def _finding(place: str, hint: str, *, level: Literal["warn", "fail"] = "fail") -> Finding:
    return Finding(level=level, place=place, text=_TEXT, hint=hint)
