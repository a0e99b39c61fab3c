"""``islandctl stop``."""

from __future__ import annotations

from typing import Annotated

import typer


def stop(
    run: Annotated[str | None, typer.Argument(help="The run; left out: the newest one.")] = None,
    deadline: Annotated[
        float,
        typer.Option("--deadline", min=0, help="Seconds that the cells get to checkpoint; 0: end them at once."),
    ] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="The report as one JSON document on stdout.")] = False,
) -> None:
    """Stop a run: a joint checkpoint, an orderly end, and the proof that no process is left.

    Ends with 1 when processes are left (they are named), and with 5 when a node cannot be asked.

    Examples:

      islandctl stop

      islandctl stop demo-1 --deadline 60
    """
    from islandctl.cli import output
    from islandctl.runs.record import load, load_plan_of
    from islandctl.runs.stop import stop as stop_run

    record = load(run)
    plan = load_plan_of(record)
    report = stop_run(record, plan, output.message, deadline_s=deadline)
    if json:
        output.as_json(report)
    else:
        for line in report.lines:
            output.data(line)
    raise typer.Exit(report.exit_code)
