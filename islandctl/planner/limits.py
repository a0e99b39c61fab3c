"""What the planner can plan and ``launch`` cannot run yet.

It does not make the plan infeasible: whether the model trains so is a question of its own, and the plan answers it;
it only says that ``launch`` will refuse.
"""

from __future__ import annotations

from islandctl.planner.plan import Finding, Plan


def not_yet(plan: Plan) -> list[Finding]:
    """One finding for everything in the plan that ``launch`` must refuse. Empty: it can be launched."""
    recompute = plan.recipe.training.recompute
    if recompute == "none":
        return []
    place, text = f"training.recompute: {recompute}", "launch does not run this yet"
    return [Finding(level="warn", place=place, text=text, hint="leave it out")]
