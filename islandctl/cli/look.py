"""How things look in the terminal: numbers with units, sparklines, the status table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from islandctl.cli.output import typeable
from islandctl.config.units import bytes_text
from islandctl.runs.status import CellView, RunStatus

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "launching": "cyan",
    "pending": "cyan",
    "starting": "cyan",
    "running": "green",
    "training": "green",
    "evaluating": "green",
    "checkpointing": "green",
    "finished": "bold green",
    "waiting": "yellow",
    "ending": "yellow",
    "degraded": "yellow",
    "restarting": "yellow",
    "away": "yellow",
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


def table(*headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house's look: a line under its headings, no frame, numbers (``right``) to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    return made


def age(created: str, now: datetime | None = None) -> float:
    """Seconds since a record's time."""
    moment = datetime.fromisoformat(created)
    return max(0.0, ((now or datetime.now(UTC)) - moment).total_seconds())


class StatusView:
    """The whole status of a run, as wide as the terminal, at most 100 columns.

    A headline, the progress, one row a cell, and what needs a word.

    Args:
        events: what happened lately, oldest first, as (time of day, text).
        foot: a last line, for the keys that work.
    """

    def __init__(self, status: RunStatus, *, events: Sequence[tuple[str, str]] = (), foot: str = "") -> None:
        self._status, self._events, self._foot = status, events, foot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        status, width = self._status, min(options.max_width, 100)
        folds = console.is_terminal  # elsewhere a text stays on its line, where a program finds it
        yield _headline(status, folds)
        yield _progress(status, width)
        if status.cells:
            yield from self._of_cells(console, options, width, folds)
        if status.culprit is not None and status.culprit.lines:
            yield Text(f"last lines of {status.culprit.node}:", style="bold")
            for line in status.culprit.lines:
                yield Text(f"  {line}")
        if status.hint:
            yield _fact("next", typeable(status.hint), folds, style="bold")
        if self._events:
            yield Text("")
        for moment, text in self._events:
            yield Text.assemble((f"{moment}  ", "dim"), text)
        if self._foot:
            yield Text(f"\n{self._foot}", style="dim")

    def _of_cells(
        self, console: Console, options: ConsoleOptions, width: int, folds: bool
    ) -> Iterator[RenderableType]:
        from rich.text import Text

        status = self._status
        yield Text("")
        narrow, unbound = _cells(status), options.update(max_width=1000)
        for form in (_cells(status, wide=True, own=True), _cells(status, own=True), narrow):
            if form is narrow or console.measure(form, options=unbound).maximum <= width:
                yield form
                break
        yield Text("")
        yield _fact("rounds", _rounds(status), folds)
        joint = status.joint_checkpoint
        yield _fact("checkpoint", "no joint one yet" if joint is None else f"step {joint.step}, joint", folds)
        for cell in status.cells:
            for note in _notes(cell):
                if note in status.detail:
                    continue  # the headline says so
                yield _fact(short(cell.name, 16), note, folds)


def _headline(status: RunStatus, folds: bool) -> Text:
    from rich.text import Text

    text = Text.assemble((status.run, "bold"), "  ", (status.state, _COLOURS.get(status.state, "default")))
    if status.attempt > 1:
        text.append(f"  attempt {status.attempt}")
    if status.detail:
        text.append(f"  {status.detail}")
    text.no_wrap, text.overflow = not folds, "fold" if folds else "ignore"
    return text


def _progress(status: RunStatus, width: int) -> Text:
    """A bar and how far the slowest cell is."""
    from rich.text import Text

    said = f"step {'-' if status.step is None else status.step}/{status.steps}"
    said += eta(status)
    room = max(0, min(60, width - len(said) - 2))
    done = round(room * min(1.0, (status.step or 0) / status.steps))
    return Text.assemble(("━" * done, "green"), ("─" * (room - done), "dim"), "  ", said)


def eta(status: RunStatus) -> str:
    """When it is through, or where its budget ends it before that; empty while that is not known."""
    if status.budget_step is not None:
        return f"  budget ends it at step {status.budget_step}, in {duration(status.budget_left_s)}"
    return "" if status.eta_s is None else f"  ETA {duration(status.eta_s)}"


def _cells(status: RunStatus, *, wide: bool = False, own: bool = False) -> Table:
    """One row a cell. A cell's name begins with its site's.

    Args:
        own: where cells take steps of their own, also how many in all, and the window.
    """
    from rich.text import Text

    numbers = ("step", "window", "tokens/s", "sent", "late", "skipped", "beat")
    more = numbers[3:] if wide else ()
    own = own and any(cell.steps is not None for cell in status.cells)
    windows = ("window",) if own else ()
    never = not any(cell.bits_per_byte for cell in status.cells)
    by_loss = never and any(cell.loss is not None for cell in status.cells)  # a script that never evaluates
    bits_or_loss = "loss" if by_loss else "bits per byte"
    made = table("cell", "state", "step", *windows, bits_or_loss, "tokens/s", *more, right=numbers)
    widest = max(len(_of(cell.steps or status.steps, cell.steps if own else None)) for cell in status.cells)
    for column, least in ((1, 11), (2, widest), (3 + own, 17 if wide else 13)):
        made.columns[column].min_width = least  # so that nothing jumps while the run goes on
    sites = list(dict.fromkeys(cell.site for cell in status.cells))
    for cell in status.cells:
        colour = SITE_COLOURS[sites.index(cell.site) % len(SITE_COLOURS)]
        bits = _bits(cell.bits_per_byte, 10 if wide else 6)
        if by_loss:
            bits = "-" if cell.loss is None else f"{cell.loss:.4f}"
        rounds = [_number(number) for number in (cell.rounds_sent, cell.rounds_late, cell.rounds_skipped)]
        beat = "files" if cell.source == "files" else brief(cell.heartbeat_age_s)
        made.add_row(
            Text(short(cell.name, 16 if wide else 12), style=colour),
            Text(cell.state, style=_COLOURS.get(cell.state, "default")),
            _of(cell.step, cell.steps if own else None),
            *([_of(cell.window, cell.windows)] if own else ()),
            bits,
            count(cell.tokens_per_s),
            *([*rounds, beat] if wide else ()),
        )
    return made


def _bits(curve: Sequence[tuple[int, float]], width: int) -> str:
    """The last value, and the curve without the untrained model, beside which everything would look flat."""
    if not curve:
        return "-"
    return f"{curve[-1][1]:.4f} {sparkline([value for step, value in curve if step > 0], width)}".rstrip()


def short(name: str, length: int) -> str:
    """A name, cut with an ellipsis to at most ``length`` signs."""
    return name if len(name) <= length else name[: length - 1] + "…"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _of(value: int | None, whole: int | None) -> str:
    """``70``, or ``70/140`` where the whole is not that of the run."""
    return _number(value) + ("" if whole is None else f"/{whole}")


def _fact(label: str, said: str, folds: bool, style: str = "") -> RenderableType:
    """A label and what it says; on a terminal a long text goes on under its own beginning."""
    from rich.table import Table
    from rich.text import Text

    if not folds:
        return Text(f"{label:10}  {said}", no_wrap=True, overflow="ignore")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=10, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style="dim"), Text(said, style=style))
    return grid


def _rounds(status: RunStatus) -> str:
    relay = status.relay
    if relay.state == "ended":
        with_it = "with the run" if status.ended else "though the run has not"
        return f"the relay has ended: {relay.detail}" if relay.detail else f"the relay ended {with_it}"
    if relay.state == "absent":
        return "the relay was never started"
    if relay.state != "answering":
        return f"the relay is {relay.state}" + (f": {relay.detail}" if relay.detail else "")
    said = f"{relay.rounds_committed} committed"
    said += f", {relay.rounds_empty} empty" if relay.rounds_empty else ""
    said += " in this attempt" if status.attempt > 1 else ""
    said += f", {relay.rounds_open} open" if relay.rounds_open else ""
    sent = sum(cell.bytes_up or 0 for cell in status.cells)
    return said + (f"; {bytes_text(sent)} sent since the relay started" if sent else "")


def _notes(cell: CellView) -> Iterator[str]:
    """What a cell's row cannot hold: its message, restarts, nodes that do not run."""
    if cell.detail and cell.state != "finished" and cell.detail != cell.last_end:
        yield cell.detail
    if cell.restarts:
        last = f", last: {cell.last_end}" if cell.last_end else ""
        yield f"restarted {cell.restarts} time{'s' if cell.restarts > 1 else ''}{last}"
    if len(cell.nodes) > 1:
        for node in cell.nodes:
            if node.state not in ("running", "ended"):
                word = f"({node.kind}) " if node.kind else ""
                yield f"node {node.label} is {node.state} {word}{node.detail}".rstrip()
