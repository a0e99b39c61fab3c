"""``islandctl launch``: from a recipe or plan to a run that is followed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from islandctl.cli.options import Detach, Json, Sites, flag

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan


def launch(
    source: Annotated[Path, typer.Argument(metavar="RECIPE|PLAN", help="A recipe, or a plan made by `plan --out`.")],
    site: Sites = (),  # type: ignore[assignment]
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the run; left out: recipe, date, number.")
    ] = None,
    detach: Detach = False,
    yes: Annotated[bool, flag("--yes", "-y", help="Do not ask, whatever it costs.")] = False,
    json: Json = False,
) -> None:
    """Start a run on its sites and follow it. Ctrl-C detaches; the run goes on.

    Ends with 0 when the run finished, 1 when it failed or was stopped, 3 when the plan cannot work, 4 when a node is
    not fit, 5 when one cannot be reached, 6 when the budget stopped it.

    Examples:
      islandctl launch recipe.yaml --site east.yaml --site west.yaml
      islandctl launch run.plan --run paper-1 --detach --yes
    """
    from islandctl.cli import output
    from islandctl.cli.asking import questions
    from islandctl.cli.attend import attend
    from islandctl.cli.transfers import Transfers
    from islandctl.runs.launch import check_plan, start

    plan = _plan(source, site)
    for warning in check_plan(plan):
        output.message(f"warning: {warning}")
    _confirm(plan, yes)
    try:
        with questions(json) as ask, Transfers() as transfers:
            record = start(plan, run, transfers.say, ask, transfers.progress)
    except KeyboardInterrupt:
        output.message("interrupted before the workers ran; what was started is ended again")
        raise typer.Exit(130) from None
    output.message(f"{record.run}: the workers are started; islandctl status {record.run}")
    attend(record, detach=detach, json=json)


def _plan(source: Path, sites: list[Path]) -> Plan:
    from islandctl.cli import output
    from islandctl.config.load import load_recipe, load_site
    from islandctl.errors import UsageError
    from islandctl.planner.file import load_plan, looks_like_plan
    from islandctl.planner.make import make_plan
    from islandctl.runs.sources import check_files

    if looks_like_plan(source):
        if sites:
            raise UsageError(f"{source}: a plan holds its sites already", hint="leave --site out")
        plan = load_plan(source)
        for note in check_files(plan):
            output.message(f"note: {note}")
        return plan
    recipe = load_recipe(source)
    if not sites:
        raise UsageError(f"{source}: a recipe needs its sites", hint=f"islandctl launch {source} --site PROFILE")
    return make_plan(recipe, [load_site(path) for path in sites])


def _confirm(plan: Plan, yes: bool) -> None:
    """Ask before money is spent, where there is somebody to ask; never required."""
    import sys

    if yes or plan.cost_per_hour is None or not plan.cost_per_hour.value or not sys.stdin.isatty():
        return
    if not typer.confirm(f"This run costs about {plan.cost_per_hour.value:.2f} USD an hour. Start it?", err=True):
        raise typer.Exit(130)
