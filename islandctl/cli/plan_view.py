"""A plan on the terminal: at most 100 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from islandctl.cli.output import typeable
from islandctl.cli.tables import plain_table, print_table, wide_console
from islandctl.config.site import SiteProfile
from islandctl.config.units import bits_per_s_text, bytes_text, count_text, memory_text, seconds_text
from islandctl.planner.limits import not_yet
from islandctl.planner.plan import CellEstimate, CellPlan, Change, Figure, Finding, Plan

FEW_CELLS = 4
"""Up to so many, each cell has a row of its own."""
MOST_ROWS = 12
FEW_ALIKE = 3
"""Up to so many findings that differ only in their figures are shown one by one."""
MOST_CONSTRAINTS = 8
IN_THE_TABLE = ("memory of", "checkpoints")
"""Findings that say nothing new while all is well."""
_LEGEND = "sent, fetched: a window; round: snapshot to result; link: share of time in use"
_MARKS = {"fail": ("✗", "bold red"), "warn": ("!", "yellow"), "ok": ("✓", "green")}


def show(plan: Plan, *, command: str, settings: Sequence[str] = (), run: str | None = None) -> None:
    """Print the plan, its findings, and the command that launches it.

    Args:
        settings: what ``--set`` has changed.
        run: whose figures have taken the place of assumed ones.
    """
    console = wide_console()
    console.print(_title(plan))
    if settings:
        console.print(Text(f"with {', '.join(settings)}", style="bold"))
    if run is not None:
        console.print(Text(_measured_words(plan, run), style="bold"))
    print_table(console, _sites(plan))
    if plan.estimates:
        print_table(console, _cells(plan))
        own = "; steps: its own" if own_steps(plan) else ""
        console.print(Text(_LEGEND + own, style="dim"))
    for line in _total_lines(plan):
        console.print(line)
    if plan.constraints:
        print_table(console, _constraints(plan))
    if plan.methods:
        print_table(console, _methods(plan))
    for finding in gathered(_said_once(plan.findings), plan.constraints[0].place if plan.constraints else ""):
        if finding.level != "ok" or not finding.text.startswith(IN_THE_TABLE):
            _print_finding(console, finding)
    for change in plan.changes:
        console.print(_change(change), soft_wrap=False)
    console.print(_verdict(plan, command), soft_wrap=True)


def _measured_words(plan: Plan, run: str) -> str:
    """Which figures are measured, and where."""
    names = ("step", "memory", "sent", "fetched", "exchange")
    used = [
        name
        for name in names
        if any(site.measured.source == f"run {run}" and getattr(site.measured, name) for site in plan.sites)
    ]
    return f"measured in run {run}: {', '.join(used) or 'nothing that holds for this recipe and these sites'}"


def _title(plan: Plan) -> Text:
    recipe, training, exchange = plan.recipe, plan.recipe.training, plan.recipe.exchange
    text = Text()
    text.append(recipe.name, style="bold")
    if recipe.worker.command is not None:
        text.append(f"  {' '.join(recipe.worker.command)}")
    elif recipe.model is not None:
        text.append(f"  {recipe.model.kind}")
    if plan.parameters_total is not None:
        text.append(f", {count_text(plan.parameters_total)} parameters")
    if recipe.model is not None and recipe.model.kind == "moe" and plan.parameters_active is not None:
        text.append(f", {count_text(plan.parameters_active)} active")
    text.append(f"; {training.steps:,} steps of {training.batch * training.sequence:,} tokens a cell\n")
    if exchange.mode == "none":
        return text.append("one cell alone, nothing is exchanged")
    return text.append(
        f"{exchange.mode}: {len(plan.cells)} cells; window {exchange.window}"
        f"{' (each its own steps)' if own_steps(plan) else ''}, {exchange.fragments} fragments, "
        f"overlap {exchange.overlap}, codec {exchange.codec}"
    )


def _sites(plan: Plan) -> Table:
    table = plain_table("site", "accelerators", "nodes", "scheduler", "link up", "link down", "rtt")
    emulate = plan.recipe.relay.emulate
    shown = plan.sites if len(plan.sites) <= MOST_ROWS + 1 else plan.sites[:MOST_ROWS]
    for site in shown:
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
    if left := len(plan.sites) - len(shown):
        table.add_row(f"and {left} more")
    return table


def _nodes(site: SiteProfile) -> str:
    return f"{site.num_nodes} × {site.ranks_per_node}"


def _cells(plan: Plan) -> Table:
    headings = ["cell", "ranks", "memory a rank", "step", "MFU", "tokens/s", "sent", "fetched", "round", "link"]
    if own_steps(plan):
        headings.insert(4, "steps")
    table = plain_table(*headings)
    for column in table.columns[1:]:
        column.justify = "right"
    for names, row in _together(plan):
        table.add_row(names, *row)
    return table


def own_steps(plan: Plan) -> bool:
    """Whether cells take unequal numbers of steps in a window."""
    return any(cell.window is not None for cell in plan.cells)


def _together(plan: Plan) -> list[tuple[str, list[str]]]:
    """Rows of the cells' table; cells that follow one another and look alike share one."""
    rows: list[tuple[list[str], list[str]]] = []
    for cell, estimate in zip(plan.cells, plan.estimates, strict=True):
        row = _cell_row(cell, estimate)
        if rows and rows[-1][1] == row and len(plan.cells) > FEW_CELLS:
            rows[-1][0].append(cell.name)
        else:
            rows.append(([cell.name], row))
    if len(rows) > MOST_ROWS:
        left = sum(len(names) for names, _ in rows[MOST_ROWS:])
        rows = [*rows[:MOST_ROWS], ([f"and {left} more"], [""] * len(rows[0][1]))]
    return [(names[0] if len(names) == 1 else f"{names[0]} … ({len(names)})", row) for names, row in rows]


def _cell_row(cell: CellPlan, estimate: CellEstimate) -> list[str]:
    share = estimate.link_share
    return [
        str(cell.num_ranks),
        _memory(estimate),
        "unknown" if estimate.step is None else seconds_span(estimate.step),
        *([] if cell.window is None else [str(cell.window)]),
        "?" if estimate.utilisation is None else _percent_span(estimate.utilisation),
        "unknown" if estimate.tokens_per_s is None else count_text(estimate.tokens_per_s.value),
        bytes_text(estimate.bytes_up_per_window.value),
        bytes_text(estimate.bytes_down_per_window.value),
        seconds_text(estimate.exchange.value),
        "unknown" if share is None else share_text(share.value),
    ]


def _total_lines(plan: Plan) -> list[Text]:
    """The run as a whole: time, waiting, failures, money."""
    totals, lines = plan.totals, []
    if totals.duration is not None and totals.tokens_per_s is not None and totals.computing is not None:
        lines.append(
            f"{count_text(totals.tokens)} tokens in {seconds_span(totals.duration)}, "
            f"{count_text(totals.tokens_per_s.value)} tokens/s; the cell that waits most trains "
            f"{_percent_span(totals.computing)} of the time"
        )
    if plan.estimates and plan.estimates[0].bytes_up_per_window.value and plan.estimates[0].link_share is not None:
        lines.append(_window_line(plan))
    if totals.between_failures is not None:
        text = f"one failure in {seconds_span(totals.between_failures)} (assumed)"
        if totals.lost is not None:
            text += f"; checkpoints, repeated work and restarts take {_percent_span(totals.lost)}"
        if totals.best_checkpoint_every is not None:
            best = totals.best_checkpoint_every
            text += f"; best every {best.low:,.0f} to {best.high:,.0f} steps"
        lines.append(text)
    if totals.cost_per_hour is not None:
        cost = totals.cost_per_hour
        text = f"cost {_span(cost.low, cost.high, '{:,.0f}')} USD/h"
        if totals.cost_per_billion_tokens is not None and totals.cost_to_end is not None:
            each, end = totals.cost_per_billion_tokens, totals.cost_to_end
            text += f", {_span(each.low, each.high, '{:,.2f}')} USD for 10⁹ tokens"
            text += f", {_span(end.low, end.high, '{:,.0f}')} USD to the end"
        lines.append(f"{text} ({cost.formula})")
    return [Text(line) for line in lines]


def _window_line(plan: Plan) -> str:
    """The WAN's share of a window, of the cell whose link is the busiest."""
    cell = max(plan.estimates, key=lambda one: one.link_share.value if one.link_share else 0.0)
    assert cell.link_share is not None
    assert cell.run_step is not None
    window = plan.recipe.exchange.window * cell.run_step.value
    sent = max(cell.bytes_up_per_window.value, cell.bytes_down_per_window.value)
    busy = seconds_text(cell.link_share.value * window)
    line = (
        f"WAN: {rate_text(sent * 8).removesuffix('/s')} a window and direction, {busy} of {seconds_text(window)} "
        f"({share_text(cell.link_share.value)}) in {cell.cell}"
    )
    relay = plan.totals.relay_bytes_per_s
    return line if relay is None else f"{line}; relay {rate_text(relay.value * 8)}"


def _constraints(plan: Plan) -> Table:
    table = plain_table("what is used", "where", "needs", "has", "use", "")
    for column in table.columns[2:5]:
        column.justify = "right"
    first = plan.constraints[0]
    marks = {0: "◀ binds" if first.hard and first.use > 1 else "◀ weakest link", 1: "next"}
    for number, one in enumerate(plan.constraints[:MOST_CONSTRAINTS]):
        style = "bold red" if one.hard and one.use > 1 else "bold" if number == 0 else ""
        table.add_row(
            one.name,
            one.place,
            amount_text(one.need, one.unit),
            amount_text(one.has, one.unit),
            f"{one.use:.1%}" if one.use < 0.1 else f"{one.use:,.0%}",
            marks.get(number, ""),
            style=style,
        )
    return table


def amount_text(number: float, unit: str) -> str:
    """A quantity of a constraint."""
    match unit:
        case "B":
            return memory_text(number)
        case "s":
            return seconds_text(number)
        case "":
            return f"{number:.1%}"
        case _:
            return f"{number:.3g} {unit}"


def _methods(plan: Plan) -> Table:
    shares = list(plan.methods[0].bandwidth)
    table = plain_table("method (16 bits a value)", "computes", *(f"{float(share):.0%} takes" for share in shares))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in plan.methods:
        table.add_row(row.name, f"{row.computing:.0%}", *(rate_text(rate) for rate in row.bandwidth.values()))
    return table


def rate_text(bits_per_s: float) -> str:
    """``6.21 Gbit/s``."""
    return bits_per_s_text(bits_per_s).split(" (")[0]


def _change(change: Change) -> Text:
    text = Text("→ ", style="green")
    text.append(f"--set {change.setting}", style="bold")
    text.append(f" (now {change.before}): {change.effect}", style="not bold")
    return text


def _memory(estimate: CellEstimate) -> str:
    need, limit = estimate.memory_per_rank, estimate.memory_limit
    form = "{:.0f}" if need.high >= 10 * 2**30 else "{:.1f}"
    span = _span(need.low / 2**30, need.high / 2**30, form)
    return f"{span} / {form.format(limit.value / 2**30) if limit else '?'} GiB"


def share_text(share: float) -> str:
    """``7%``."""
    return f"{share:.0%}" if share >= 0.01 or share == 0 else "<1%"


def _percent_span(figure: Figure) -> str:
    low, high = f"{figure.low:.0%}", f"{figure.high:.0%}"
    return low if low == high else f"{low[:-1]}–{high}"


def seconds_span(figure: Figure) -> str:
    """``2.61–4.21 s``."""
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


def gathered(findings: Sequence[Finding], worst: str) -> list[Finding]:
    """With one in place of many that differ only in their figures: the one of the place ``worst``, else the first."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        kind = re.sub(r"\d[\d.,]*( [\w/]+)?", "#", finding.text)
        alike.setdefault((finding.level, kind, finding.hint), []).append(finding)
    shown = []
    for same in alike.values():
        if len(same) <= FEW_ALIKE:
            shown += same
            continue
        one = next((finding for finding in same if worst in finding.place.split(", ")), same[0])
        more = len(same) - 1
        shown.append(one.model_copy(update={"place": f"{one.place}, and {more} more like it (--json shows all)"}))
    return shown


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
    if not_yet(plan):
        return Text("feasible  ", style="bold green").append("but launch does not run it yet: see !", style="default")
    return Text("feasible  ", style="bold green").append(f"next: {typeable(command)}", style="default")
