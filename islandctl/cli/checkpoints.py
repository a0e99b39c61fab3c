"""``islandctl checkpoints``."""

from __future__ import annotations

from typing import Annotated

import typer


def checkpoints(
    run: Annotated[str | None, typer.Argument(help="The run; left out: the newest one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the checkpoints that a run can go back to, and what lies on the nodes.

    Examples:

      islandctl checkpoints demo-1

      islandctl checkpoints demo-1 --json | jq .joint[-1].step
    """
    from rich import box
    from rich.table import Table

    from islandctl.cli import output
    from islandctl.runs.checkpoints import survey
    from islandctl.runs.record import load, load_plan_of

    record = load(run)
    found = survey(record, load_plan_of(record), output.message)
    if json:
        output.as_json(found)
        return
    if not found.rows:
        output.message(f"{record.run}: no checkpoint yet")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("step", "attempt", "joint", "on the nodes of", "note"):
        table.add_column(heading, justify="right" if heading in ("step", "attempt") else "left")
    for row in found.rows:
        table.add_row(
            str(row.step), str(row.attempt), "yes" if row.joint else "no", ", ".join(row.held_by) or "-", row.note
        )
    output.console().print(table)
