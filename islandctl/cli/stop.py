"""``islandctl stop``: a checkpoint, an end, and the proof that nothing is left."""

from __future__ import annotations

from typing import Annotated

import typer

from islandctl.cli.options import Json, RunName


def stop(
    run: RunName = None,
    deadline: Annotated[
        float,
        typer.Option("--deadline", min=0, metavar="S", help="Seconds to checkpoint in; 0: end everything at once."),
    ] = 300.0,
    json: Json = False,
) -> None:
    """Stop a run: checkpoint, end, and prove that no process is left.

    Ends with 1 when processes are left (they are named), and with 5 when a node cannot be asked.

    Examples:
      islandctl stop
      islandctl stop demo-1 --deadline 60
    """
    from islandctl.cli import output
    from islandctl.errors import UsageError
    from islandctl.runs.record import load, load_plan_of
    from islandctl.runs.stop import stop as stop_run
    from islandctl.runs.stop import stop_unreadable

    try:
        record = load(run)
    except UsageError as error:
        if run is None:
            raise
        report = stop_unreadable(run, error, output.message)
    else:
        report = stop_run(record, load_plan_of(record), output.message, deadline_s=deadline)
    if json:
        output.as_json(report)
    else:
        for line in report.lines:
            output.data(line)
    raise typer.Exit(report.exit_code)
