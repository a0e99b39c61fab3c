"""``islandctl plan``: what would run where, whether it fits, and what the exchange costs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from islandctl.cli.options import Json, Sites
from islandctl.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe (YAML).", show_default=False)],
    site: Sites,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Save the plan, for `islandctl launch`.")
    ] = None,
    json: Json = False,
) -> None:
    """Check recipe and profiles, and say what would run where and whether it fits.

    Shows for every cell its memory, step time and WAN traffic as ranges with what binds. Nothing is contacted and
    nothing is started. Exit code 2: a file is wrong; 3: the plan cannot work.

    Examples:
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --out run.plan
      islandctl plan recipe.yaml --site us.yaml --site asia.yaml --json | jq .feasible
    """
    from islandctl.config.load import load_recipe, load_site
    from islandctl.planner.file import is_plan
    from islandctl.planner.make import make_plan

    if is_plan(recipe):
        raise UsageError(f"{recipe}: is a plan already", hint=f"islandctl launch {recipe}")
    made = make_plan(load_recipe(recipe), [load_site(path) for path in site])
    if out is not None:
        save_plan(made, out)
    if json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        from islandctl.cli.plan_view import show

        show(made, command=_launch_command(made, recipe, site, out))
    if not made.feasible:
        binding = next(finding for finding in made.findings if finding.level == "fail")
        raise InfeasibleError(f"the plan cannot work: {binding.place}: {binding.text}", hint=binding.hint)


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


def _launch_command(plan: Plan, recipe: Path, sites: list[Path], out: Path | None) -> str:
    from shlex import quote

    if out is not None:
        return f"islandctl launch {quote(str(out))}"
    return " ".join(["islandctl launch", quote(str(recipe)), *(f"--site {quote(str(path))}" for path in sites)])
