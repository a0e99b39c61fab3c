"""Has the recipe changed since the launch? What differs, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from islandctl.config.recipe import Recipe
from islandctl.errors import UsageError
from islandctl.planner.plan import Plan, config_hash

DECISIVE = ("model", "data", "training", "exchange", "worker.command")
"""What decides the weights; see ``planner.plan.config_hash``."""
MAX_SHOWN = 12
_NONE = object()


def check_recipe(plan: Plan, read: Callable[[str], Recipe | None], *, run: str) -> list[str]:
    """Refuse a resume under another configuration than the run's own.

    Args:
        plan: the run's frozen plan.
        read: a source file's present content, when it is a recipe that has changed; None otherwise.

    Returns:
        Notes for the person: changes that do not decide the weights, and are not taken up.

    Raises:
        UsageError: the recipe on disk would decide other weights; shows what differs.
    """
    notes = []
    for path in plan.sources:
        recipe = read(path)
        if recipe is None:
            continue
        changes = differences(plan.recipe, recipe)
        if config_hash(recipe, plan.cells, plan.files) == plan.config_hash:
            if changes:
                notes.append(f"{path} has changed ({'; '.join(changes)}); the run keeps the values of its launch")
            continue
        decisive = [change for change in changes if change.startswith(DECISIVE)]
        raise UsageError(
            f"{path} has changed since the launch of {run}: " + "; ".join(decisive),
            hint="put the old values back to resume, or start another run with islandctl launch",
        )
    return notes


def script_notes(plan: Plan, changed: Collection[str]) -> list[str]:
    """Notes on the script's files among the ``changed`` sources: a run keeps what it was launched with."""
    folder = os.path.dirname(next(iter(plan.sources), ""))
    scripts = [path for name in plan.files if (path := os.path.join(folder, name)) in changed]
    return [f"{path} has changed; the run keeps the one of its launch" for path in scripts]


def differences(old: Recipe, new: Recipe) -> list[str]:
    """``training.steps: 100 → 200``, one a changed value, at most a dozen."""
    before, after = (_flat(recipe.model_dump(mode="json")) for recipe in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    changed = [
        f"{key}: {_shown(before.get(key, _NONE))} → {_shown(after.get(key, _NONE))}"
        for key in keys
        if before.get(key, _NONE) != after.get(key, _NONE)
    ]
    more = len(changed) - MAX_SHOWN
    return changed if more <= 0 else [*changed[:MAX_SHOWN], f"and {more} more"]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flat(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _shown(value: object) -> str:
    return "absent" if value is _NONE else str(value)
