"""``islandctl remove``: a run that has ended, gone."""

from __future__ import annotations

from typing import Annotated

import typer

from islandctl.cli.options import Json, flag


def remove(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    checkpoints: Annotated[bool, flag("--checkpoints", help="The checkpoints on the sites as well.")] = False,
    forget: Annotated[
        bool, flag("--forget", help="Also when a host does not answer; what is there stays there.")
    ] = False,
    yes: Annotated[bool, flag("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a run that has ended: its record here, its relay's data, its files on the sites.

    The checkpoints on the sites stay, unless `--checkpoints` is given. Refused while a process of the run is left
    (ends with 2) and while a host cannot be asked (5). Afterwards the name is free.

    Examples:
      islandctl remove demo-1
      islandctl remove demo-1 --checkpoints --yes
    """
    import sys

    from islandctl.cli import output
    from islandctl.runs.record import check_known
    from islandctl.runs.remove import remove as remove_run

    check_known(run)
    if not yes and sys.stdin.isatty():
        rest = "its checkpoints" if checkpoints else "all but its checkpoints"
        if not typer.confirm(f"Remove the record of {run} here, and {rest} on its sites?", err=True):
            raise typer.Exit(130)
    report = remove_run(run, output.message, checkpoints=checkpoints, forget=forget)
    if json:
        output.as_json(report)
    else:
        for line in report.lines:
            output.data(line)
