"""Tables on the terminal: at most 100 columns, and no figure cut."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

MAX_COLUMNS = 100


def wide_console() -> Console:
    """The terminal, or what stands in for it: never more than ``MAX_COLUMNS`` wide."""
    console = Console(highlight=False, emoji=False)
    if console.is_terminal and console.width <= MAX_COLUMNS:
        return console
    return Console(highlight=False, emoji=False, width=MAX_COLUMNS)


def plain_table(*names: str) -> Table:
    """Columns under a line, nothing broken. Its cells are texts."""
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: where the terminal is too narrow for its columns, in several parts below one another, each
    with the first column. A figure that is cut (``17…`` for 178 %) says something else."""
    width = console.width
    for part in _parts(table, width):
        console.width = max(width, sum(_widths(part)))  # one that still does not fit is left to the terminal to break
        console.print(part, crop=False)
        console.width = width


def _widths(table: Table) -> list[int]:
    """Of the columns, each with the blank or blanks behind it."""
    gap = 2
    return [gap + max(cell_len(str(text)) for text in (column.header, *column.cells)) for column in table.columns]


def _parts(table: Table, width: int) -> Iterator[Table]:
    widths = _widths(table)
    if sum(widths) - 2 <= width or len(widths) < 3:
        yield table
        return
    chosen = [0]
    for index in range(1, len(widths)):
        if len(chosen) > 1 and sum(widths[number] for number in (*chosen, index)) - 2 > width:
            yield _only(table, chosen)
            chosen = [0]
        chosen.append(index)
    yield _only(table, chosen)


def _only(table: Table, indices: list[int]) -> Table:
    """The table with these of its columns."""
    part = plain_table(*(str(table.columns[index].header) for index in indices))
    for column, index in zip(part.columns, indices, strict=True):
        column.justify = table.columns[index].justify
    cells = [list(table.columns[index].cells) for index in indices]
    for number, row in enumerate(table.rows):
        part.add_row(*(column[number] for column in cells), style=row.style)
    return part
