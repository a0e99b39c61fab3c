"""``islandctl plan``: what would run where, whether it fits, and what the exchange costs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from islandctl.cli.options import Json, MaybeSites, flag
from islandctl.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from islandctl.config.load import Loaded
    from islandctl.config.recipe import Recipe
    from islandctl.config.site import SiteProfile
    from islandctl.planner.change import Case
    from islandctl.planner.from_run import Shown
    from islandctl.planner.plan import Finding, Plan


def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="The recipe (YAML).", show_default=False)
    ] = None,
    site: MaybeSites = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Save the plan, for `islandctl launch`.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="What if: another value for one key; can be repeated."),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="PATH=A..B", help="Plan over a range of one key, or of two."),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the sweep as CSV.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the sweep as SVG, or PNG (needs matplotlib).")
    ] = None,
    explain: Annotated[bool, flag("--explain", help="Every figure with its range, formula and inputs.")] = False,
    simulate: Annotated[
        bool, flag("--simulate", help="Play the schedule with jitter, outages and restarts.")
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Of the simulation; 0.")] = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from-run", metavar="RUN", help="Hold a run against its plan, or plan with what it has shown."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check recipe and profiles, and say what would run where, whether it fits, how fast, and what it costs.

    Shows for every cell its memory, step time and WAN traffic as ranges, for the run its time, failures and cost, and
    what is used the most; where the plan cannot work or waits, settings that help, each planned again. Nothing is
    contacted and nothing is started. Exit code 2: a file is wrong; 3: the plan cannot work.

    A PATH is a key of the recipe (exchange.overlap), of one site (oslo.wan.up) or of all (site.wan.up);
    wan.bandwidth is both directions.

    With --simulate the schedule is played with jitter, stragglers, outages of sites and restarts of the relay, all
    from a seed: how much of the time is trained, how late results come, what is lost.

    With --from-run alone, a run is held against its plan. With --set, --sweep, --simulate, --explain, --out or a
    RECIPE as well, everything is planned again with what the run has shown in place of what was assumed; without a
    RECIPE, as the run itself was planned.

    Examples:
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --out run.plan
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --set exchange.overlap=8 --explain
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --sweep 'site.wan.bandwidth=1..100 Gbit/s'
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --json | jq .feasible
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --simulate --seed 7
      islandctl plan --from-run demo-1
    """
    from islandctl.planner.change import parse_setting
    from islandctl.planner.make import make_plan

    shown = _shown(from_run)
    if shown is not None and recipe is None and not (settings or sweeps or out or explain or simulate):
        _compare(shown, json=json)
        return
    case = _case(recipe, site or [], shown)
    case = case.changed_together([parse_setting(setting) for setting in settings or ()])
    if sweeps:
        if out is not None or explain or simulate:
            raise UsageError(
                "--sweep makes many plans: without --out, --explain and --simulate", hint="--set plans one of them"
            )
        _sweep(case, sweeps, csv=csv, plot=plot, json=json)
        return
    if csv is not None or plot is not None:
        raise UsageError("--csv and --plot belong to --sweep", hint="--sweep exchange.overlap=1..20 --csv FILE")
    if seed is not None and not simulate:
        raise UsageError("--seed belongs to --simulate", hint="--simulate --seed 1")
    if simulate:
        if out is not None or explain:
            raise UsageError("--simulate plays a plan: without --out and --explain", hint="leave one of them out")
        _simulate(case, seed or 0, json=json)
        return
    made = make_plan(case.recipe, case.sites, case.shown)
    if out is not None:
        save_plan(made, out)
    if json:
        typer.echo(made.model_dump_json(indent=2))
    elif explain:
        from islandctl.cli.plan_explain import show_explained

        show_explained(made)
    else:
        from islandctl.cli.plan_view import show

        command = _launch_command(recipe, site or [], out, changed=bool(settings))
        show(made, command=command, settings=tuple(settings or ()), run=from_run)
    if not made.feasible:
        raise InfeasibleError(f"the plan cannot work: {_what_binds(made)}", hint=_what_helps(made))


def _shown(run: str | None) -> Shown | None:
    if run is None:
        return None
    from islandctl.cli import output
    from islandctl.runs.record import load
    from islandctl.runs.shown import shown_by

    return shown_by(load(run), output.message)


def _compare(shown: Shown, *, json: bool) -> None:
    if json:
        from islandctl.cli import output

        cells = [cell.model_dump(mode="json") for cell in shown.cells]
        compared = [one.model_dump(mode="json") for one in shown.comparisons()]
        output.as_json({"run": shown.run, "cells": cells, "comparisons": compared})
    else:
        from islandctl.cli import plan_run

        plan_run.show(shown)


def _case(recipe: Path | None, sites: list[Path], shown: Shown | None) -> Case:
    """What is to be planned: the files that are named, or what the run was planned from.

    Raises:
        ConfigError: a file is wrong.
        UsageError: no recipe, or a plan in its place.
    """
    from islandctl.config.load import load_recipe, load_site
    from islandctl.planner.change import Case
    from islandctl.planner.file import is_plan

    if recipe is None:
        if shown is None:
            raise UsageError("missing argument RECIPE", hint="islandctl plan --help")
        if sites:
            raise UsageError("--site without a RECIPE", hint="name the recipe too, or leave --site out")
        return Case(*as_loaded(shown.plan), shown)
    if is_plan(recipe):
        raise UsageError(f"{recipe}: is a plan already", hint=f"islandctl launch {recipe}")
    return Case(load_recipe(recipe), [load_site(path) for path in sites], shown)


def as_loaded(plan: Plan) -> tuple[Loaded[Recipe], list[Loaded[SiteProfile]]]:
    """A plan's own recipe and profiles, as if they were loaded from their files again."""
    from islandctl.config.load import Loaded

    (first, known), *rest = plan.sources.items()
    recipe = Loaded(plan.recipe, first, known, files=plan.files)
    # behind the profiles come a script's own files
    return recipe, [Loaded(site, path, text) for site, (path, text) in zip(plan.sites, rest, strict=False)]


def _what_binds(plan: Plan) -> str:
    """The binding constraint, and the next one behind it."""
    from islandctl.cli.plan_view import amount_text

    beyond = [one for one in plan.constraints if one.hard and one.use > 1]
    if not beyond:
        failing = _failing(plan)
        return f"{failing.place}: {failing.text}"
    one = beyond[0]
    text = f"{one.place}: {one.name}: needs {amount_text(one.need, one.unit)}, has {amount_text(one.has, one.unit)}"
    return text + (f"; behind it {beyond[1].name} in {beyond[1].place}" if beyond[1:] else "")


def _what_helps(plan: Plan) -> str:
    return f"--set {plan.changes[0].setting}" if plan.changes else _failing(plan).hint


def _failing(plan: Plan) -> Finding:
    """The finding that says what the binding constraint says; where there is none, the first that fails."""
    failing = [finding for finding in plan.findings if finding.level == "fail"]
    name = plan.constraints[0].name if plan.constraints else ""
    words = {
        "WAN in a window": "the exchange needs",
        "round's deadline": "the largest fragment needs",
        "space for checkpoints": "checkpoints:",
    }.get(name, name)
    return next((finding for finding in failing if finding.text.startswith(words)), failing[0])


def _simulate(case: Case, seed: int, *, json: bool) -> None:
    from islandctl.planner.make import simulate_plan

    plan, played = simulate_plan(case, seed)
    if json:
        typer.echo(played.model_dump_json(indent=2))
    else:
        from islandctl.cli import plan_simulate

        plan_simulate.show(plan, played)


def _sweep(case: Case, sweeps: list[str], *, csv: Path | None, plot: Path | None, json: bool) -> None:
    from islandctl.cli import plan_sweep
    from islandctl.planner.make import sweep_plans
    from islandctl.planner.sweep import parse_axis

    swept = sweep_plans(case, [parse_axis(text) for text in sweeps])
    if csv is not None:
        plan_sweep.write(csv, plan_sweep.csv_text(swept))
    if plot is not None:
        plan_sweep.draw(plot, swept)
    if json:
        typer.echo(swept.model_dump_json(indent=2))
    else:
        plan_sweep.show(swept)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan whole or not at all.

    Raises:
        UsageError: the path holds something that is no plan, or cannot be written.
    """
    from islandctl.planner.file import looks_like_plan, plan_text

    if path.exists() and not looks_like_plan(path):
        raise UsageError(f"{path}: exists and is no plan; it is left as it is", hint="choose another name for --out")
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(plan_text(plan))
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}", hint="choose another path for --out"
        ) from error


def _launch_command(recipe: Path | None, sites: list[Path], out: Path | None, *, changed: bool) -> str:
    from shlex import quote

    if out is not None:
        return f"islandctl launch {quote(str(out))}"
    if recipe is None or changed:  # a launch of the files would not do what was planned here
        return "--out FILE saves it for islandctl launch"
    return " ".join(["islandctl launch", quote(str(recipe)), *(f"--site {quote(str(path))}" for path in sites)])
