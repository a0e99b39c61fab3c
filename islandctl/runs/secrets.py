"""The secrets of a plan on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from islandctl.config import secrets
from islandctl.errors import PreflightError

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan


def know(plan: Plan) -> None:
    """From now on no message shows the value of one."""
    for names in _named(plan).values():
        secrets.know(names)


def demand_all(plan: Plan) -> None:
    """See that every secret that a plan names is set here.

    Raises:
        PreflightError: one is not.
    """
    for key, names in _named(plan).items():
        for name in names:
            if name not in secrets.values(names):
                raise PreflightError(
                    f"{key}: {name} is not set on this machine", hint=f"export {name}=…, then type the command again"
                )


def _named(plan: Plan) -> dict[str, tuple[str, ...]]:
    """By key of recipe or profile."""
    sites = {f"{site.name}: environment.secrets": site.environment.secrets for site in plan.sites}
    return {"worker.secrets": plan.recipe.worker.secrets, **sites}
