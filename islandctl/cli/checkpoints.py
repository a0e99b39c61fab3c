"""``islandctl checkpoints``: what a run can go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from islandctl.cli.options import Json, RunName
from islandctl.errors import UnreachableError

if TYPE_CHECKING:
    from islandctl.runs.checkpoints import Survey


def checkpoints(
    run: RunName = None,
    json: Json = False,
) -> None:
    """List the checkpoints that a run can go back to, and what else lies on its nodes.

    Ends with 5 when a cell cannot be asked: what it holds is then unknown.

    Examples:
      islandctl checkpoints demo-1
      islandctl checkpoints demo-1 --json | jq '[.rows[] | select(.resumable)][-1].step'
    """
    from islandctl.cli import output
    from islandctl.runs.checkpoints import survey
    from islandctl.runs.record import load, load_plan_of

    record = load(run)
    found = survey(record, load_plan_of(record), output.message)
    if json:
        output.as_json(found)
    elif found.rows:
        _show(found)
    elif not found.unreachable:
        output.message(f"{record.run}: no checkpoint yet")
    if found.unreachable:
        raise typer.Exit(UnreachableError.exit_code)


def _show(found: Survey) -> None:
    from islandctl.cli import output
    from islandctl.cli.look import table

    shown = table("step", "attempt", "resume", "on the nodes of", "note", right=("step", "attempt"))
    shown.columns[3].no_wrap = shown.columns[4].no_wrap = False
    for row in found.rows:
        shown.add_row(
            str(row.step), str(row.attempt), "yes" if row.resumable else "no", ", ".join(row.held_by) or "-", row.note
        )
    output.console().print(shown)
