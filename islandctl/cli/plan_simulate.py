"""A simulated run on the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from islandctl.cli.tables import plain_table, print_table, wide_console
from islandctl.config.units import seconds_text
from islandctl.planner.plan import Plan
from islandctl.planner.simulated import Simulated, Spread


def show(plan: Plan, played: Simulated) -> None:
    """Print the distributions, what was counted, and what was assumed."""
    console = wide_console()
    console.print(Text(_title(plan, played), style="bold"))
    table = plain_table("over", "figure", "p10", "p50", "p90")
    for column in table.columns[2:]:
        column.justify = "right"

    def row(over: str, name: str, told: Spread | None, text: Callable[[float], str]) -> None:
        cells = ["none"] * 3 if told is None else [text(told.p10), text(told.p50), text(told.p90)]
        table.add_row(over, name, *cells)

    row("windows", "time that trains, of all cells", played.computing, _percent)
    row("rounds", "longest wait of a cell for the result", played.wait_s, seconds_text)
    row("failures", "lost: away, repeated and skipped", played.lost_s, seconds_text)
    row("runs", "time to the end", played.duration_s, seconds_text)
    print_table(console, table)
    planned = [one.computing.value for one in plan.estimates if one.computing is not None]
    beside = f" (planned, without anything going wrong: {sum(planned) / len(planned):.1%})" if planned else ""
    console.print(Text(f"trains {played.computing_mean:.1%} of the time{beside}"))
    console.print(
        Text(
            f"rounds: {played.late_rounds:.2%} late, {played.empty_rounds:.2%} empty, "
            f"{played.partial_rounds:.2%} without somebody"
        )
    )
    console.print(
        Text(
            f"a run: {played.failures:,.4g} failures of cells, which take {played.lost_share:.2%} of their time, "
            f"{played.site_outages:,.3g} outages of whole sites among them; the relay {played.relay_restarts:,.3g} "
            "times away"
        )
    )
    for words in played.assumptions:
        console.print(Text(f"assumed: {words}", style="dim"))


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _title(plan: Plan, played: Simulated) -> str:
    text = f"{plan.recipe.name}: {_number(played.cells, 'cell')}, {_number(played.windows, 'window')}"
    if played.windows < played.windows_planned:
        text += f" of {played.windows_planned:,}"
    return f"{text}, played {_number(played.runs, 'time')} from seed {played.seed}"


def _number(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"
