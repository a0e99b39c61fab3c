"""Following a run: a live view on a terminal, plain lines elsewhere, until the run ends or Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from islandctl.cli import output
from islandctl.cli.look import StatusView, count, eta
from islandctl.config.budget import BY_BUDGET
from islandctl.errors import BudgetError, RunError

if TYPE_CHECKING:
    from islandctl.runs.gather import Watcher
    from islandctl.runs.status import CellView, RunStatus

    Look = Callable[[], RunStatus]

PAUSE_S = 1.0
LASTING = {"waiting": 5}
"""Looks after which a state is worth a line: more than a round takes; else two."""
QUIET = 15
"""Looks after which a cell that nothing was told of, but that has moved, tells its step and loss."""
SHOWN_EVENTS = 5
_FOOT = "Ctrl-C detaches; the run goes on"


def follow(watcher: Watcher, *, quiet: bool = False, then_ended: bool = True) -> RunStatus:
    """Show the run until it ends; gives its last status.

    Args:
        quiet: nothing on stdout; what is new goes to stderr as plain lines.
        then_ended: the caller ends the relay of a run that has finished, so nobody need be told to.

    Raises:
        typer.Exit: 130 when the person detaches with Ctrl-C; the run goes on.
    """

    def look() -> RunStatus:
        status = watcher.look()
        return status.model_copy(update={"hint": ""}) if then_ended and status.state == "finished" else status

    try:
        return _live(look) if output.lively(sys.stdout) and not quiet else _plain(look, quiet)
    except KeyboardInterrupt:
        raise _detached(watcher.run) from None


def json_lines(watcher: Watcher) -> RunStatus:
    """Print one JSON object a line for every look, until the run ends; gives its last status.

    Raises:
        typer.Exit: 130 when the person detaches with Ctrl-C; the run goes on.
    """
    try:
        while True:
            status = watcher.look()
            output.as_json_line(status)
            if status.ended:
                return status
            time.sleep(PAUSE_S)
    except KeyboardInterrupt:
        raise _detached(watcher.run) from None


def _detached(run: str) -> typer.Exit:
    output.message(f"detached; the run goes on; islandctl status {run}")
    return typer.Exit(130)


def end(watcher: Watcher, status: RunStatus) -> int:
    """After a followed run has ended: end its relay and tunnels, say so, and give the exit code.

    A failed run keeps its relay only as long as this takes as well: everything it knows is in its files.
    """
    from islandctl.runs.record import load, load_plan_of
    from islandctl.runs.stop import stop

    record = load(watcher.run)
    code = exit_code(status)
    if record.phase == "launched":
        report = stop(
            record, load_plan_of(record), output.message, deadline_s=0.0, reason=status.detail or status.state
        )
        for line in report.model_copy(update={"checkpoint": None}).lines:
            output.message(line)
        code = code or report.exit_code
    for line in closing_lines(status, str(_folder(watcher.run))):
        output.message(line)
    return code


def closing_lines(status: RunStatus, folder: str) -> Iterator[str]:
    """How the run came out; then, as the last line, where its record lies and what to type next.

    Args:
        folder: the run's record.
    """
    curves = [cell.bits_per_byte for cell in status.cells if cell.bits_per_byte]
    if curves:
        first, last = (sum(curve[at][1] for curve in curves) / len(curves) for at in (0, -1))
        least, most = min(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
        yield f"bits per byte on held-out text: {first:.4f} at step {least}, {last:.4f} at step {most}"
    elif losses := [cell.loss for cell in status.cells if cell.loss is not None]:
        yield f"loss: {sum(losses) / len(losses):.4f} at step {status.step}"
    following = f"islandctl checkpoints {status.run}" if status.state == "finished" else status.hint
    yield f"record: {folder}; next: {following or f'islandctl status {status.run}'}"


def exit_code(status: RunStatus) -> int:
    """0 for a run that finished, 6 where its budget stopped it, 1 for one that failed or was stopped otherwise."""
    if status.state == "stopped" and status.detail.startswith(BY_BUDGET):
        return BudgetError.exit_code
    return 0 if status.state == "finished" else RunError.exit_code


def _folder(run: str) -> str:
    from islandctl.config.paths import RunFolder

    return str(RunFolder.of(run).root)


def _live(look: Look) -> RunStatus:
    from rich.live import Live

    console, events = output.console(), Events()
    shown: deque[tuple[str, str]] = deque(maxlen=SHOWN_EVENTS)
    console.print()
    with Live(console=console, auto_refresh=False, transient=False) as screen:
        while True:
            status = look()
            moment = time.strftime("%H:%M:%S")
            shown.extend((moment, text) for text in events.new(status))
            foot = "" if status.ended else _FOOT
            screen.update(StatusView(status, events=tuple(shown), foot=foot), refresh=True)
            if status.ended:
                return status
            time.sleep(PAUSE_S)


def _plain(look: Look, quiet: bool) -> RunStatus:
    lines, events = Lines(), Events()
    while True:
        status = look()
        for line in (*lines.new(status), *(f"{status.run}: {text}" for text in events.new(status))):
            print(output.typeable(line), file=sys.stderr if quiet else sys.stdout, flush=True)
        if status.ended:
            if not quiet:
                output.console().print(StatusView(status), crop=False)
            return status
        time.sleep(PAUSE_S)


class Lines:
    """What is new since the last look, as plain lines: one an evaluation, one a change of state that lasts.

    A loop that is never evaluated, or seldom, tells its step and loss now and then.
    Cells wait for a round in every window, and a link may be gone for a second: that is no news. An end is told at
    once.
    """

    def __init__(self) -> None:
        self._told = ""
        self._state, self._looks = "", 0
        """What the last looks in a row have shown, and how many of them."""
        self._steps: dict[int, int] = {}
        self._quiet: dict[int, tuple[int | None, int]] = {}
        """By cell: its step when something was told of it last, and how many looks ago that was."""

    def new(self, status: RunStatus) -> Iterator[str]:
        """Lines for what this look shows and the last one did not."""
        if self._is_news(status):
            self._told = status.state
            yield f"{status.run}: {status.state}" + (f": {status.detail}" if status.detail else "")
        for cell in status.cells:
            before = self._steps.get(cell.cell)
            new = [one for one in cell.bits_per_byte if before is None or one[0] > before]
            self._steps[cell.cell] = new[-1][0] if new else -1 if before is None else before
            for step, bits in new:
                line = f"{cell.name}: step {step}/{cell.steps or status.steps}  {bits:.4f} bits per byte"
                # rate and ETA are of now: what lies before the first look, or has a newer one behind it, is history
                present = before is not None and step == new[-1][0]
                yield line + (_pace(cell, status) if present else "")
            yield from self._of_quiet(cell, status, told=bool(new))

    def _of_quiet(self, cell: CellView, status: RunStatus, *, told: bool) -> Iterator[str]:
        step, looks = self._quiet.get(cell.cell, (cell.step, 0))
        if told:
            step, looks = cell.step, 0
        elif looks >= QUIET and cell.step != step:
            loss = "" if cell.loss is None else f"  loss {cell.loss:.4f}"
            yield f"{cell.name}: step {cell.step}/{status.steps}{loss}{_pace(cell, status)}"
            step, looks = cell.step, 0
        self._quiet[cell.cell] = step, looks + 1

    def _is_news(self, status: RunStatus) -> bool:
        self._looks = self._looks + 1 if status.state == self._state else 1
        self._state = status.state
        if status.state == self._told:
            return False
        return not self._told or status.ended or self._looks >= LASTING.get(status.state, 2)


def _pace(cell: CellView, status: RunStatus) -> str:
    """Rate and ETA, where they are known."""
    rate = f"  {count(cell.tokens_per_s)} tokens/s" if cell.tokens_per_s else ""
    return rate + eta(status)


class Events:
    """What happened between two looks and deserves a word: checkpoints, restarts, cells queued, in trouble, and back.

    The first look tells nothing: what lies before it is not news.
    """

    _TROUBLE = ("pending", "ending", "restarting", "away", "silent", "unreachable", "lost", "failed", "stopped")

    def __init__(self) -> None:
        self._last: RunStatus | None = None

    def new(self, status: RunStatus) -> Iterator[str]:
        """One line an event, in the order of the cells."""
        last, self._last = self._last, status
        if last is None:
            return
        joint = status.joint_checkpoint
        if joint is not None and (last.joint_checkpoint is None or last.joint_checkpoint.step != joint.step):
            yield f"joint checkpoint at step {joint.step}"
        before = {cell.cell: cell for cell in last.cells}
        for cell in status.cells:
            if cell.cell in before:
                yield from self._of_cell(before[cell.cell], cell)

    def _of_cell(self, last: CellView, cell: CellView) -> Iterator[str]:
        if cell.restarts > last.restarts:
            yield f"{cell.name} was started again, restart {cell.restarts}"
        if cell.state in self._TROUBLE and last.state != cell.state:
            yield f"{cell.name} is {cell.state}" + (f": {cell.detail}" if cell.detail else "")
        elif last.state in self._TROUBLE and cell.state not in self._TROUBLE:
            yield f"{cell.name} is {cell.state} again"
        elif cell.state == "finished" and last.state != "finished":
            yield f"{cell.name} is through"
        skipped, before = cell.rounds_skipped, last.rounds_skipped
        if skipped is not None and before is not None and skipped > before:
            yield f"{cell.name}: {skipped} rounds were committed without its packet so far"
