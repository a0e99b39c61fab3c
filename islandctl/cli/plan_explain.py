"""Every figure of a plan with its range, its formula and the inputs it used."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from rich.text import Text

from islandctl.cli.plan_view import amount_text
from islandctl.cli.tables import wide_console
from islandctl.config.units import bits_per_s_text, bytes_text, count_text, memory_text, seconds_text
from islandctl.planner.plan import Figure, Plan


def show_explained(plan: Plan) -> None:
    """Print them all: cells (those that are alike once), the run, and what is used."""
    console = wide_console()
    for place, figures in _parts(plan):
        console.print(Text(place, style="bold"))
        for name, figure in figures:
            said = Text(f"  {name.replace('_', ' ')}: ")
            said.append(_range(figure), style="bold")
            said.append("  (assumed)" if figure.assumed else "  (follows from the inputs)", style="dim")
            console.print(said)
            console.print(Text(f"      {figure.formula}", style="dim"))
    console.print(Text("what is used", style="bold"))
    for one in plan.constraints:
        amounts = f"{amount_text(one.need, one.unit)} of {amount_text(one.has, one.unit)}"
        console.print(Text(f"  {one.name} in {one.place}: {amounts} = {one.use:.1%}"))
        console.print(Text(f"      {one.formula}", style="dim"))
    for name, text in plan.sources.items():
        console.print(Text(f"source {name} blake3 {text[:16]}…", style="dim"), soft_wrap=True)


def _parts(plan: Plan) -> Iterator[tuple[str, list[tuple[str, Figure]]]]:
    cells: dict[str, list[str]] = {}
    figures = {}
    for estimate in plan.estimates:
        alike = estimate.model_copy(update={"cell": "x"}).model_dump_json()
        cells.setdefault(alike, []).append(estimate.cell)
        figures[alike] = _figures(estimate)
    for alike, names in cells.items():
        shown = ", ".join(names if len(names) <= 3 else [*names[:2], f"and {len(names) - 2} more"])
        yield f"cell {shown}", figures[alike]
    yield "the run", _figures(plan.totals)


def _figures(record: BaseModel) -> list[tuple[str, Figure]]:
    return [(name, value) for name, value in record if isinstance(value, Figure)]


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
