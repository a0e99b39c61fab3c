"""A run held against its plan, on the terminal."""

from __future__ import annotations

from rich.text import Text

from islandctl.cli import output
from islandctl.cli.tables import plain_table, print_table, wide_console
from islandctl.config.units import bytes_text, memory_text, seconds_text
from islandctl.planner.from_run import FEWEST_FAILURES, Comparison, Shown

_NAMES = {
    "memory": "memory of a rank, peak",
    "step": "step",
    "sent": "sent a window",
    "fetched": "fetched a window",
    "exchange": "round, slowest fragment",
}


def show(shown: Shown) -> None:
    """Print what was measured against what was planned."""
    console = wide_console()
    table = plain_table("cell", "figure", "planned", "range", "measured", "of planned", "")
    for column in table.columns[2:6]:
        column.justify = "right"
    for one in shown.comparisons():
        table.add_row(*_row(one))
    print_table(console, table)
    console.print(Text(_failures(shown)))
    again = output.typeable(f"islandctl plan --from-run {shown.run} --set exchange.overlap=8")
    console.print(Text(f"planned again with what was measured: {again}", style="dim"), soft_wrap=True)


def _row(one: Comparison) -> list[str]:
    ratio, mark = "", {True: "✓ in range", False: "! out of range", None: ""}[one.within]
    if one.planned and one.measured is not None:
        ratio = f"{one.measured / one.planned:.1%}"
    span = "" if one.low is None or one.low == one.high else f"{_amount(one, one.low)} – {_amount(one, one.high)}"
    planned = "unknown" if one.planned is None else _amount(one, one.planned)
    measured = "not shown" if one.measured is None else _amount(one, one.measured)
    return [one.cell, _NAMES[one.name], planned, span, measured, ratio, mark]


def _amount(one: Comparison, number: float | None) -> str:
    if number is None:
        return ""
    if one.name == "memory":
        return memory_text(number)
    return seconds_text(number) if one.unit == "s" else bytes_text(number)


def _failures(shown: Shown) -> str:
    text = f"{shown.failures} failures in {shown.accelerator_hours:,.3g} accelerator-hours"
    if shown.failures < FEWEST_FAILURES:
        text += f": fewer than {FEWEST_FAILURES} say too little, so the assumed rate stays"
    return text
