"""A plan on the terminal: at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from islandctl.cli.output import typeable
from islandctl.config.site import SiteProfile
from islandctl.config.units import bits_per_s_text, bytes_text, count_text, seconds_text
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding, Plan

MAX_COLUMNS = 100
_LEGEND = "sent, fetched: a window; round: snapshot to result; hidden: by overlap; link: share of time in use"
_MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}


def show(plan: Plan, *, command: str) -> None:
    """Print the plan, its findings, and the command that launches it."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal or console.width > MAX_COLUMNS:
        console = Console(highlight=False, emoji=False, width=MAX_COLUMNS)
    console.print(_title(plan))
    console.print(_sites(plan))
    console.print(_cells(plan))
    console.print(Text(_LEGEND, style="dim"))
    if plan.cost_per_hour is not None:
        cost = plan.cost_per_hour
        console.print(Text(f"cost {_span(cost.low, cost.high, '{:,.0f}')} USD/h ({cost.formula})"))
    for finding in _said_once(plan.findings):
        _print_finding(console, finding)
    console.print(_verdict(plan, command), soft_wrap=True)


def _title(plan: Plan) -> Text:
    recipe, training, exchange = plan.recipe, plan.recipe.training, plan.recipe.exchange
    text = Text()
    text.append(recipe.name, style="bold")
    text.append(f"  {recipe.model.kind}, {count_text(plan.parameters_total)} parameters")
    if plan.recipe.model.kind == "moe":
        text.append(f", {count_text(plan.parameters_active)} active")
    text.append(f"; {training.steps:,} steps of {training.batch * training.sequence:,} tokens a cell\n")
    if exchange.mode == "none":
        return text.append("one cell alone, nothing is exchanged")
    return text.append(
        f"{exchange.mode}: {len(plan.cells)} cells; window {exchange.window}, {exchange.fragments} fragments, "
        f"overlap {exchange.overlap}, codec {exchange.codec}"
    )


def _sites(plan: Plan) -> Table:
    table = _table("site", "accelerators", "nodes", "scheduler", "link up", "link down", "rtt")
    emulate = plan.recipe.relay.emulate
    for site in plan.sites:
        up, down, rtt = site.wan.up, site.wan.down, site.wan.rtt
        if emulate is not None:
            up, down, rtt = min(up, emulate.bandwidth), min(down, emulate.bandwidth), max(rtt, emulate.rtt)
        table.add_row(
            site.name,
            f"{site.gpu.count} × {site.gpu.type}",
            _nodes(site),
            site.scheduler,
            bits_per_s_text(up),
            "the same" if down == up else bits_per_s_text(down),
            seconds_text(rtt) + (" emulated" if emulate else ""),
        )
    return table


def _nodes(site: SiteProfile) -> str:
    return f"{site.num_nodes} × {site.ranks_per_node}"


def _cells(plan: Plan) -> Table:
    table = _table("cell", "ranks", "memory a rank", "step", "tokens/s", "sent", "fetched", "round", "hidden", "link")
    for column in table.columns[1:]:
        column.justify = "right"
    for cell, estimate in zip(plan.cells, plan.estimates, strict=True):
        table.add_row(*_cell_row(cell, estimate))
    return table


def _cell_row(cell: CellPlan, estimate: CellEstimate) -> list[str]:
    share = estimate.link_share
    return [
        cell.name,
        str(cell.num_ranks),
        _memory(estimate),
        "unknown" if estimate.step is None else _seconds_span(estimate.step),
        "unknown" if estimate.tokens_per_s is None else count_text(estimate.tokens_per_s.value),
        bytes_text(estimate.bytes_up_per_window.value),
        bytes_text(estimate.bytes_down_per_window.value),
        seconds_text(estimate.exchange.value),
        "unknown" if estimate.overlap is None else seconds_text(estimate.overlap.value),
        "unknown" if share is None else f"{share.value:.0%}" if share.value >= 0.01 else "<1%",
    ]


def _memory(estimate: CellEstimate) -> str:
    need, limit = estimate.memory_per_rank, estimate.memory_limit
    form = "{:.0f}" if need.high >= 10 * 2**30 else "{:.1f}"
    span = _span(need.low / 2**30, need.high / 2**30, form)
    return f"{span} of {form.format(limit.value / 2**30) if limit else '?'} GiB"


def _seconds_span(figure: Figure) -> str:
    low, high = seconds_text(figure.low), seconds_text(figure.high)
    low_number, low_unit = low.split(" ")
    return low if low == high else f"{low_number}–{high}" if low_unit == high.split(" ")[1] else f"{low}–{high}"


def _span(low: float, high: float, form: str) -> str:
    first, last = form.format(low), form.format(high)
    return first if first == last else f"{first}–{last}"


def _said_once(findings: Sequence[Finding]) -> list[Finding]:
    """Without what is fine at one place where the same text is a warning at another: one text has one mark."""
    graver = {finding.text for finding in findings if finding.level != "ok"}
    return [finding for finding in findings if finding.level != "ok" or finding.text not in graver]


def _print_finding(console: Console, finding: Finding) -> None:
    mark, style = _MARKS[finding.level]
    text = Text(f"{finding.place}: ", style="bold")
    text.append(finding.text, style="not bold")
    if finding.hint:
        text.append(f" → {finding.hint}", style="not bold dim")
    for number, line in enumerate(text.wrap(console, console.width - 2)):
        line.rstrip()
        console.print(Text.assemble((mark if number == 0 else " ", style), " ", line))


def _verdict(plan: Plan, command: str) -> Text:
    if not plan.feasible:
        return Text("infeasible: see ✗", style="bold red")
    return Text("feasible  ", style="bold green").append(f"next: {typeable(command)}", style="default")


def _table(*names: str) -> Table:
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.columns[0].no_wrap = True
    return table
