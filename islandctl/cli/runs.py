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
    from islandctl.runs.listed import Listed
    from islandctl.runs.record import load_all, names

    records = load_all()
    for name in sorted(set(names()) - {record.run for record in records}):
        output.message(f"{name}: its record cannot be read; islandctl status {name} says why")
    if json:
        output.as_json([Listed.of(record).model_dump(mode="json") for record in records])
        return
    if not records:
        output.message("no run yet; islandctl launch RECIPE --site PROFILE starts one")
        return
    lines = [["run", "started", "last known", "attempt", "cells", "note"]]
    for record in records:
        cells = ", ".join(cell.name for cell in record.cells)
        note = "" if record.reason == record.last_known else record.reason
        ago = f"{brief(age(record.created))} ago"
        lines.append([record.run, ago, record.last_known, str(record.attempt), cells, note])
    if not sys.stdout.isatty():  # a program that reads it gets everything, and no blanks at a line's end
        for text in columns(lines):
            output.data(text)
        return
    console = output.console()
    lines = fitted(lines, console.width)
    console.width = sum(max(map(len, column)) + GAP for column in zip(*lines, strict=True))
    shown = table(*lines[0], right=("attempt",))
    for line in lines[1:]:
        shown.add_row(*line)
    console.print(shown)


def columns(lines: list[list[str]]) -> list[str]:
    """The table's lines as plain text, each column as wide as its longest text."""
    widths = [max(map(len, column)) + GAP for column in zip(*lines, strict=True)]
    return ["".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def fitted(lines: list[list[str]], width: int) -> list[list[str]]:
    """The table's lines, headings first, for a terminal of ``width`` signs.

    The last two columns, cells and note, are shortened, or left out where little would remain of them. The columns
    before them stay whole.
    """
    from islandctl.cli.look import short

    *whole, cells, note = (list(column) for column in zip(*lines, strict=True))
    room = width - sum(max(map(len, column)) + GAP for column in whole)
    kept = [*whole]
    if room >= 2 * LEAST + GAP:
        width_of_cells = min(max(map(len, cells)), max(LEAST, room // 3))
        kept.append([short(text, width_of_cells) for text in cells])
        room -= width_of_cells + GAP
    if room >= LEAST:
        kept.append([short(text, room) for text in note])
    return [list(line) for line in zip(*kept, strict=True)]
