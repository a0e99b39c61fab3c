"""``islandctl resume``: on from a joint checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from islandctl.cli.options import Detach, Json, RunName


def resume(
    run: RunName = None,
    step: Annotated[
        int | None, typer.Option("--from", min=0, metavar="STEP", help="A joint checkpoint; 0: the beginning.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="LIMIT", help="Raise the budget, in all: '24 h' or '800 USD'."),
    ] = None,
    detach: Detach = False,
    json: Json = False,
) -> None:
    """Go on from the newest joint checkpoint that every node holds unharmed.

    Examples:
      islandctl resume
      islandctl resume demo-1 --from 400 --detach
      islandctl resume demo-1 --budget '24 h'
    """
    from islandctl.cli import output
    from islandctl.cli.asking import questions
    from islandctl.cli.attend import attend
    from islandctl.config.budget import parse_budget
    from islandctl.runs.record import load, load_plan_of
    from islandctl.runs.resume import resume as resume_run

    record = load(run)
    plan = load_plan_of(record)
    limit = parse_budget(budget) if budget is not None else None
    with questions(json) as ask:
        record = resume_run(record, plan, output.message, ask, step=step, budget=limit)
    attend(record, detach=detach, json=json)
