"""``islandctl runs``."""

from __future__ import annotations

from typing import Annotated

import typer


def runs(json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List the runs that this machine has started, oldest first, without asking any node.

    Examples:

      islandctl runs

      islandctl runs --json | jq -r .[].run
    """
    from rich import box
    from rich.table import Table

    from islandctl.cli import output
    from islandctl.cli.look import age, duration
    from islandctl.runs.record import load_all

    records = load_all()
    if json:
        keys = ("run", "created", "phase", "reason", "attempt", "config_hash", "plan_hash")
        output.as_json(
            [
                {
                    **{key: getattr(record, key) for key in keys},
                    "sites": list(dict.fromkeys(c.site for c in record.cells)),
                }
                for record in records
            ]
        )
        return
    if not records:
        output.message("no run yet; islandctl launch RECIPE --site PROFILE starts one")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "started", "last command", "attempt", "cells"):
        table.add_column(heading, no_wrap=heading != "cells")
    for record in records:
        cells = ", ".join(cell.name for cell in record.cells)
        table.add_row(record.run, f"{duration(age(record.created))} ago", record.phase, str(record.attempt), cells)
    output.console().print(table)
