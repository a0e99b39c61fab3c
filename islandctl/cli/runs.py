"""``islandctl runs``: what this machine has started."""

from __future__ import annotations

from islandctl.cli.options import Json

GAP = 2
"""Signs between two columns of a table."""
LEAST = 8
"""Signs below which a shortened text tells nothing."""


def runs(
    json: Json = False,
) -> None:
    """List the runs that this machine has started, oldest first.

    Examples:
      islandctl runs
      islandctl runs --json | jq -r '.[].run'
    """
    import sys

    from islandctl.cli import output
    from islandctl.cli.look import age, brief, table
    from islandctl.runs.record import load_all, names

    records = load_all()
    for name in sorted(set(names()) - {record.run for record in records}):
        output.message(f"{name}: its record cannot be read; islandctl status {name} says why")
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
    lines = [["run", "started", "last known", "attempt", "cells", "note"]]
    for record in records:
        cells = ", ".join(cell.name for cell in record.cells)
        known, note = ("finished", "") if record.reason == "finished" else (record.phase, record.reason)
        ago = f"{brief(age(record.created))} ago"
        lines.append([record.run, ago, known, str(record.attempt), cells, note])
    console, looked_at = output.console(), sys.stdout.isatty()
    if looked_at:  # a program that reads it gets everything
        lines = fitted(lines, console.width)
    console.width = sum(max(map(len, column)) + GAP for column in zip(*lines, strict=True))
    shown = table(*lines[0], right=("attempt",))
    shown.box = shown.box if looked_at else None  # the line under the headings would be as long as the longest note
    for line in lines[1:]:
        shown.add_row(*line)
    console.print(shown)


def fitted(lines: list[list[str]], width: int) -> list[list[str]]:
    """The table's lines, headings first, for a terminal of ``width`` signs.

    The last two columns, cells and note, are shortened, or left out where little would remain of them. The columns
    before them stay whole.
    """
    from islandctl.cli.look import short

    columns = [list(column) for column in zip(*lines, strict=True)]
    *whole, cells, note = columns
    room = width - sum(max(map(len, column)) + GAP for column in whole)
    kept = [*whole]
    if room >= 2 * LEAST + GAP:
        width_of_cells = min(max(map(len, cells)), max(LEAST, room // 3))
        kept.append([short(text, width_of_cells) for text in cells])
        room -= width_of_cells + GAP
    if room >= LEAST:
        kept.append([short(text, room) for text in note])
    return [list(line) for line in zip(*kept, strict=True)]
