"""What recipe and profiles name on this machine: seen to be here before any host is asked."""

from __future__ import annotations

from collections.abc import Iterator

from islandctl.config import secrets
from islandctl.config.load import place_of
from islandctl.errors import ConfigError
from islandctl.fleet.environment import check_files
from islandctl.planner.plan import Plan


def demand_all(plan: Plan) -> None:
    """See that every secret is set, and that locks and folders of wheels can be read.

    Raises:
        ConfigError: with file:line:column of where it is named; all secrets that are not set at once.
    """
    unset = {place: name for place, name in _secrets(plan) if name not in secrets.values([name])}
    if unset:
        names = " ".join(f"{name}=…" for name in dict.fromkeys(unset.values()))
        hint = f"export {names}, then type the command again"
        faults = [
            ConfigError(f"{place}: {name} is not set on this machine", hint=hint) for place, name in unset.items()
        ]
        raise ConfigError("\n".join(fault.message for fault in faults), hint=hint)
    for index, site in enumerate(plan.sites):
        for key in ("lock", "wheels"):
            try:
                check_files(site, key)
            except ConfigError as error:
                place = _place(plan, index + 1, "environment", key)
                raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error


def _secrets(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where each secret is named, and its name."""
    of_sites = [("environment", site.environment.secrets) for site in plan.sites]
    for number, (section, names) in enumerate([("worker", plan.recipe.worker.secrets), *of_sites]):
        for index, name in enumerate(names):
            yield f"{_place(plan, number, section, 'secrets', index)}: {section}.secrets", name


def _place(plan: Plan, number: int, *key: str | int) -> str:
    """``file:line:column`` of a key in the recipe (number 0) or a profile, which may be gone since the plan."""
    paths = list(plan.sources)
    own = "the recipe" if number == 0 else plan.sites[number - 1].name
    return place_of(paths[number], *key) if number < len(paths) else own
