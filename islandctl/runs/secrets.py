"""The secrets of a plan on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from islandctl.config import secrets

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan


def know(plan: Plan) -> None:
    """From now on no message shows the value of one."""
    for names in (plan.recipe.worker.secrets, *(site.environment.secrets for site in plan.sites)):
        secrets.know(names)
