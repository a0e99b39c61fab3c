"""``islandctl runs``."""

from __future__ import annotations

from islandctl.cli.options import Json


def runs(
    json: Json = False,
) -> None:
    """List the runs that this machine has started, oldest first.

    Examples:
      islandctl runs
      islandctl runs --json | jq -r '.[].run'
    """
    from islandctl.cli import output
    from islandctl.cli.look import age, duration, table
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
    shown = table("run", "started", "last command", "attempt", "cells", right=("attempt",))
    shown.columns[-1].no_wrap = False
    for record in records:
        cells = ", ".join(cell.name for cell in record.cells)
        shown.add_row(record.run, f"{duration(age(record.created))} ago", record.phase, str(record.attempt), cells)
    output.console().print(shown)
