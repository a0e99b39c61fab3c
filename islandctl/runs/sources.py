"""Have recipe and profiles changed since a launch, or since a plan was made? What differs, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from islandctl.config.load import load_recipe, load_site
from islandctl.config.model import Settings
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import UsageError
from islandctl.planner.file import changed_sources
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


def check_files(plan: Plan) -> list[str]:
    """Refuse to launch a saved plan whose files say something else by now.

    Returns:
        Notes for the person: files that are gone. The plan holds all that they said.

    Raises:
        UsageError: a profile, the recipe or a script has changed; shows what differs, the plan's value first.
        ConfigError: one of them cannot be read any more.
    """
    changed, notes, told = set(changed_sources(plan)), [], []
    for number, path in enumerate(plan.sources):
        if path not in changed:
            continue
        if not os.path.exists(path):
            notes.append(f"{path} is not there any more; the plan's values are used")
        elif number > len(plan.sites):
            told.append(f"{path}: the script's text")
        else:
            values = (
                differences(plan.recipe, load_recipe(path).value)
                if number == 0
                else _of_site(plan.sites[number - 1], load_site(path).value)
            )
            told += [f"{path}: {', '.join(values)}"] if values else []
    if told:
        raise UsageError(
            f"changed since the plan was made: {'; '.join(told)}",
            hint="make the plan again (islandctl plan … --out FILE), or put the old values back",
        )
    return notes


def _of_site(planned: SiteProfile, now: SiteProfile) -> list[str]:
    """What differs in a profile, but for what a run had shown when the plan was made (``plan --from-run``)."""
    if planned.measured.source != now.measured.source:
        planned = planned.model_copy(update={"measured": now.measured})
    return differences(planned, now)


def script_notes(plan: Plan, changed: Collection[str]) -> list[str]:
    """Notes on the script's files among the ``changed`` sources: a run keeps what it was launched with."""
    folder = os.path.dirname(next(iter(plan.sources), ""))
    scripts = [path for name in plan.files if (path := os.path.join(folder, name)) in changed]
    return [f"{path} has changed; the run keeps the one of its launch" for path in scripts]


def differences(old: Settings, new: Settings) -> list[str]:
    """``training.steps: 100 → 200``, one a changed value, at most a dozen."""
    before, after = (_flat(value.model_dump(mode="json")) for value in (old, new))
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
