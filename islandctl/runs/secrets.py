"""Secrets: named in recipe and profiles, taken from this machine's environment, and kept nowhere else on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from islandctl.errors import PreflightError

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan

LEAST_LETTERS = 6
"""A shorter value is no secret, and would be found in every other word."""
_hidden: set[str] = set()


def values(names: Iterable[str]) -> dict[str, str]:
    """Those of these variables that are set here."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def know(plan: Plan) -> None:
    """From now on :func:`hide` knows the values of this plan's secrets."""
    names = [*plan.recipe.worker.secrets, *(name for site in plan.sites for name in site.environment.secrets)]
    _hidden.update(value for value in values(names).values() if len(value) >= LEAST_LETTERS)


def demand_all(plan: Plan) -> None:
    """See that every secret that a plan names is set here.

    Raises:
        PreflightError: one is not.
    """
    wanted: Mapping[str, tuple[str, ...]] = {
        "worker.secrets": plan.recipe.worker.secrets,
        **{f"{site.name}: environment.secrets": site.environment.secrets for site in plan.sites},
    }
    for key, names in wanted.items():
        for name in names:
            if not os.environ.get(name):
                raise PreflightError(
                    f"{key}: {name} is not set on this machine", hint=f"export {name}=…, then type the command again"
                )


def hide(text: str) -> str:
    """``text`` with three stars in the place of every secret that is known."""
    for value in _hidden:
        text = text.replace(value, "***")
    return text
