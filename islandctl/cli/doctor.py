"""``islandctl doctor``: are these sites fit for this recipe, and what do their links really carry?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from islandctl.cli.options import Json, MaybeSites, flag
from islandctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from islandctl.fleet.checks.base import Check


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="The recipe (YAML).", show_default=False)
    ] = None,
    site: MaybeSites = None,
    tier: Annotated[
        str,
        typer.Option("--tier", metavar="TIER", help="quick: seconds. standard: about two minutes. deep: longer."),
    ] = "quick",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Only this check; can be repeated.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Not this check; can be repeated.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            min=1,
            max=300,
            help="How long each rate is measured; disks and products at most 30.",
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait",
            metavar="TIME",
            help="How long a job may wait for a Slurm site's nodes, as 30min. Usually 5 min, in the deep tier 1 h.",
        ),
    ] = None,
    write_profile: Annotated[
        bool, flag("--write-profile", help="Put the measured figures into the profiles, noted as measured.")
    ] = False,
    listing: Annotated[bool, flag("--list", help="Show all checks, and ask nobody.")] = False,
    json: Json = False,
) -> None:
    """Examine the sites: nodes, accelerators, disks, software, and the links to the relay as the run would use them.

    Starts a relay where the recipe places it, and tunnels where a run would need them; all of it is ended again.
    Nothing needs sudo, and what cannot be asked without more rights is skipped with the reason. Ends with 4 when a
    check fails, 5 when somebody does not answer, else 0.

    On a Slurm site the quick tier asks the login node and Slurm itself; the others submit one short job, in which the
    nodes are examined, and which is cancelled when it gets none within --wait.

    Examples:
      islandctl doctor recipe.yaml --site east.yaml --site west.yaml
      islandctl doctor recipe.yaml --site east.yaml --site west.yaml --tier standard --write-profile
      islandctl doctor recipe.yaml --site east.yaml --site west.yaml --only wan --seconds 30
      islandctl doctor recipe.yaml --site cluster.yaml --tier standard --wait 2h
      islandctl doctor recipe.yaml --site east.yaml --json | jq '.rows[] | select(.level == "fail")'
      islandctl doctor --list
    """
    from islandctl.cli import output
    from islandctl.fleet.checks.base import TIERS
    from islandctl.fleet.checks.registry import all_checks, pick

    known = next((one for one in TIERS if one == tier), None)
    if known is None:
        raise UsageError(f"there is no tier '{tier}'", hint=f"--tier {', '.join(TIERS)}")
    checks = pick(all_checks(), known, only or (), skip or ())
    if listing:
        _list(checks if only or skip else all_checks(), json=json)
        return
    if recipe is None:
        raise UsageError("missing argument RECIPE", hint="islandctl doctor --help")
    if not site:
        raise UsageError(f"{recipe}: a recipe needs its sites", hint=f"islandctl doctor {recipe} --site PROFILE")

    from islandctl.cli.asking import questions
    from islandctl.cli.doctor_view import show
    from islandctl.config.load import load_recipe, load_site
    from islandctl.runs.doctor.examine import examine
    from islandctl.runs.doctor.profile import write_profiles

    wait_s = None if wait is None else _seconds(wait)
    loaded = [load_site(path) for path in site]
    with questions(json) as ask:
        report = examine(
            load_recipe(recipe),
            loaded,
            checks,
            tier=known,
            say=output.message,
            ask=ask,
            seconds=seconds,
            wait_s=wait_s,
        )
    if write_profile:
        report = report.model_copy(update={"written": write_profiles(loaded, report.measured)})
    if json:
        output.as_json(report)
    else:
        show(report, recipe=str(recipe), profiles=[str(path) for path in site], write_profile=write_profile)
    raise typer.Exit(report.exit_code)


def _seconds(wait: str) -> float:
    from islandctl.config.units import parse_seconds

    try:
        return parse_seconds(wait)
    except ValueError as error:
        raise UsageError(f"--wait {wait}: {error}", hint="--wait 30min, --wait 2h") from error


def _list(checks: Sequence[Check], *, json: bool) -> None:
    from islandctl.cli import output

    if json:
        keys = ("name", "scope", "tier", "title", "threshold", "source", "remedy")
        output.as_json([{key: getattr(check, key) for key in keys} for check in checks])
        return
    from islandctl.cli.look import table

    shown = table("check", "tier", "of each", "what is asked", "passes")
    for column in shown.columns[3:]:
        column.no_wrap = False
    for check in checks:
        shown.add_row(check.name, check.tier, check.scope, check.title, check.threshold)
    output.console().print(shown)
