"""How things look in the terminal: numbers with units, sparklines, the status table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from islandctl.runs.status import CellView, RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "launching": "cyan",
    "starting": "cyan",
    "running": "green",
    "training": "green",
    "evaluating": "green",
    "checkpointing": "green",
    "finished": "bold green",
    "waiting": "yellow",
    "degraded": "yellow",
    "restarting": "yellow",
    "silent": "yellow",
    "unreachable": "magenta",
    "unknown": "magenta",
    "lost": "red",
    "failed": "bold red",
    "stopped": "blue",
}
SITE_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""Sites take them in turn, in the plan's order."""


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """The last ``width`` values as bars between their smallest and largest; empty for fewer than two."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in shown)


def duration(seconds: float | None) -> str:
    """``3 s``, ``2 min 10 s``, ``5 h 03 min``, ``2 d 4 h``; a dash when not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def brief(seconds: float | None) -> str:
    """``3 s``, ``2 min``, ``5 h``, ``4 d``: one unit is enough for an age; a dash when not known."""
    if seconds is None:
        return "-"
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{round(seconds)} s"


def count(number: float | None) -> str:
    """``950``, ``12.3 k``, ``4.56 M``: three digits; a dash when not known."""
    if number is None:
        return "-"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            scaled = number / limit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    return f"{number:.0f}"


def coloured(state: str) -> str:
    """A state in its colour, as rich markup."""
    return f"[{_COLOURS.get(state, 'default')}]{state}[/]"


def age(created: str, now: datetime | None = None) -> float:
    """Seconds since a record's time."""
    moment = datetime.fromisoformat(created)
    return max(0.0, ((now or datetime.now(UTC)) - moment).total_seconds())


def status_view(status: RunStatus) -> RenderableType:
    """The whole status of a run: a headline, one row a cell, and what needs a word. At most 100 columns."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    step = "-" if status.step is None else str(status.step)
    head = f"[bold]{status.run}[/]  {coloured(status.state)}  step {step}/{status.steps}"
    if status.eta_s is not None:
        head += f"  ETA {duration(status.eta_s)}"
    if status.attempt > 1:
        head += f"  attempt {status.attempt}"
    lines = [head]
    if status.detail:
        lines.append(escape(status.detail))
    tail = [_relay_line(status), _checkpoint_line(status)]
    for cell in status.cells:
        tail += _notes(cell)
    if status.culprit is not None and status.culprit.lines:
        tail.append(f"[bold]last lines of {escape(status.culprit.node)}:[/]")
        tail += [f"  {escape(line)}" for line in status.culprit.lines]
    if status.hint:
        tail.append(f"next: [bold]{escape(status.hint)}[/]")
    return Group(
        *(Text.from_markup(line) for line in lines),
        _table(status),
        *(Text.from_markup(line) for line in tail),
    )


def _table(status: RunStatus) -> RenderableType:
    """One row a cell. A cell's name begins with its site's."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("cell", max_width=16, overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("bits per byte", no_wrap=True)
    for heading in ("tokens/s", "beat", "sent", "late", "skipped"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in status.cells:
        values = [value for _, value in cell.bits_per_byte]
        bits = f"{values[-1]:.4f} {sparkline(values)}" if values else "-"
        beat = "files" if cell.source == "files" else brief(cell.heartbeat_age_s)
        rounds = (_number(number) for number in (cell.rounds_sent, cell.rounds_late, cell.rounds_skipped))
        table.add_row(
            cell.name, coloured(cell.state), _number(cell.step), bits, count(cell.tokens_per_s), beat, *rounds
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _relay_line(status: RunStatus) -> str:
    from rich.markup import escape

    relay = status.relay
    if relay.state == "ended" and status.ended:
        return "relay: ended with the run"
    if relay.state == "absent":
        return "relay: was never started"
    if relay.state != "answering":
        return f"relay: [yellow]{relay.state}[/]" + (f" ({escape(relay.detail)})" if relay.detail else "")
    empty = f", {relay.rounds_empty} empty" if relay.rounds_empty else ""
    open_ones = f", {relay.rounds_open} open" if relay.rounds_open else ""
    return f"rounds: {relay.rounds_committed} committed{empty}{open_ones}"


def _checkpoint_line(status: RunStatus) -> str:
    joint = status.joint_checkpoint
    return "last joint checkpoint: " + ("none yet" if joint is None else f"step {joint.step}")


def _notes(cell: CellView) -> list[str]:
    """What a cell's row cannot hold: its message, restarts, nodes that do not run."""
    from rich.markup import escape

    notes = []
    if cell.detail:
        notes.append(f"{cell.name}: {escape(cell.detail)}")
    if cell.restarts:
        notes.append(f"{cell.name}: restarted {cell.restarts} time{'s' if cell.restarts > 1 else ''}")
    usual = {"running", "ended"}
    if len(cell.nodes) > 1:
        notes += [
            f"{cell.name}: node {node.label} is {node.state} {escape(node.detail)}".rstrip()
            for node in cell.nodes
            if node.state not in usual
        ]
    return notes
