"""``islandctl runs``: what this machine has started."""

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
    from islandctl.cli.look import age, brief, table
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
    shown = table("run", "started", "last known", "attempt", "cells", "note", right=("attempt",))
    shown.columns[-2].no_wrap = False
    shown.columns[-1].overflow = "ellipsis"
    for record in records:
        cells = ", ".join(cell.name for cell in record.cells)
        known, note = ("finished", "") if record.reason == "finished" else (record.phase, record.reason)
        ago = f"{brief(age(record.created))} ago"
        shown.add_row(record.run, ago, known, str(record.attempt), cells, note)
    output.console().print(shown)
