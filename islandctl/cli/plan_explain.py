"""Every figure of a plan with its range, its formula, the inputs it used, and which of them are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pydantic import BaseModel
from rich.text import Text

from islandctl.cli.plan_view import amount_text
from islandctl.cli.tables import wide_console
from islandctl.config.units import bits_per_s_text, bytes_text, count_text, memory_text, seconds_text
from islandctl.planner.plan import Figure, Plan

READS = {
    "step": ("gpu.bf16",),
    "exchange": ("wan.up", "wan.down", "wan.rtt"),
    "link_share": ("wan.up", "wan.down"),
    "checkpoint_write": ("storage.write",),
    "space for checkpoints": ("storage.free",),
}
"""What the doctor measures of a site, by the figures and limits that use it first; the others follow from these."""


def show_explained(plan: Plan) -> None:
    """Print them all: cells (those that are alike once), the run, what is used, and what was measured."""
    console = wide_console()
    for place, figures in _parts(plan):
        console.print(Text(place, style="bold"))
        for name, figure, measured in figures:
            said = Text(f"  {name.replace('_', ' ')}: ")
            said.append(_range(figure), style="bold")
            said.append(f"  ({_origin(figure, measured)})", style="dim")
            console.print(said)
            console.print(Text(f"      {figure.formula}", style="dim"))
    known = {f"site {site.name}": site.found_by_doctor for site in plan.sites}
    console.print(Text("what is used", style="bold"))
    for one in plan.constraints:
        amounts = f"{amount_text(one.need, one.unit)} of {amount_text(one.has, one.unit)}"
        said = Text(f"  {one.name} in {one.place}: {amounts} = {one.use:.1%}")
        if found := [key for key in READS.get(one.name, ()) if key in known.get(one.place, ())]:
            said.append(f"  ({_by_doctor(found)})", style="dim")
        console.print(said)
        console.print(Text(f"      {one.formula}", style="dim"))
    for place, values in known.items():
        if values:
            told = ", ".join(f"{key} {text}" for key, text in values.items())
            console.print(Text(f"{place}: measured by islandctl doctor: {told}", style="dim"))
    for name, text in plan.sources.items():
        console.print(Text(f"source {name} blake3 {text[:16]}…", style="dim"), soft_wrap=True)


Told: TypeAlias = tuple[str, Figure, tuple[str, ...]]
"""A figure's name, itself, and the keys of the profile that it uses and the doctor has measured."""


def _parts(plan: Plan) -> Iterator[tuple[str, list[Told]]]:
    cells: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    figures = {}
    known = {site.name: tuple(site.found_by_doctor) for site in plan.sites}
    of_cell = {cell.name: known[cell.site] for cell in plan.cells}
    for estimate in plan.estimates:
        measured = of_cell[estimate.cell]
        alike = estimate.model_copy(update={"cell": "x"}).model_dump_json(), measured
        cells.setdefault(alike, []).append(estimate.cell)
        figures[alike] = _figures(estimate, measured)
    for alike, names in cells.items():
        shown = ", ".join(names if len(names) <= 3 else [*names[:2], f"and {len(names) - 2} more"])
        yield f"cell {shown}", figures[alike]
    yield "the run", _figures(plan.totals, ())


def _figures(record: BaseModel, measured: tuple[str, ...]) -> list[Told]:
    return [
        (name, value, tuple(key for key in READS.get(name, ()) if key in measured))
        for name, value in record
        if isinstance(value, Figure)
    ]


def _origin(figure: Figure, measured: tuple[str, ...]) -> str:
    """Where a figure comes from: a run's, or formulas, with what they use of the doctor's figures."""
    if figure.formula.startswith("measured."):
        return "measured"
    origin = "assumed" if figure.assumed else "follows from the inputs"
    return f"{origin}; {_by_doctor(measured)}" if measured else origin


def _by_doctor(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} measured by islandctl doctor"


def _range(figure: Figure) -> str:
    value, low, high = (_amount(number, figure) for number in (figure.value, figure.low, figure.high))
    return value if low == high else f"{value} ({low} to {high})"


def _amount(number: float, figure: Figure) -> str:
    match figure.unit:
        case "B":
            return memory_text(number) if "rank" in figure.formula else bytes_text(number)
        case "B/s":
            return bits_per_s_text(number * 8)
        case "s":
            return seconds_text(number)
        case "":
            return f"{number:.1%}"
        case "tokens/s":
            return f"{count_text(number)} tokens/s"
        case _:
            return f"{number:,.4g} {figure.unit}"
