"""What the planner can plan and ``launch`` cannot run yet.

It does not make the plan infeasible: whether the model trains so is a question of its own, and the plan answers it;
it only says that ``launch`` will refuse.
"""

from __future__ import annotations

from islandctl.planner.plan import Finding, Plan


def not_yet(plan: Plan) -> list[Finding]:
    """One finding for everything in the plan that ``launch`` must refuse. Empty: it can be launched."""
    recompute, findings = plan.recipe.training.recompute, []
    if recompute != "none":
        findings.append(_finding(f"training.recompute: {recompute}", "leave it out"))
    for site in plan.sites:
        if site.scheduler == "slurm":
            findings.append(_finding(f"site {site.name}: scheduler: slurm", "schedulers local and ssh run"))
    return findings


def _finding(place: str, hint: str) -> Finding:
    return Finding(level="warn", place=place, text="launch does not run this yet", hint=hint)
