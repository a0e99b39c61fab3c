"""Following a run: a live view on a terminal, plain lines elsewhere, until the run ends or Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from islandctl.cli import output
from islandctl.cli.look import count, duration, status_view
from islandctl.errors import RunError

if TYPE_CHECKING:
    from islandctl.runs.gather import Watcher
    from islandctl.runs.status import RunStatus

PAUSE_S = 1.0


def follow(watcher: Watcher, *, quiet: bool = False) -> RunStatus:
    """Show the run until it ends; gives its last status.

    Args:
        quiet: nothing on stdout; what is new goes to stderr as plain lines.

    Raises:
        typer.Exit: 130 when the person detaches with Ctrl-C; the run goes on.
    """
    try:
        return _live(watcher) if output.lively(sys.stdout) and not quiet else _plain(watcher, quiet)
    except KeyboardInterrupt:
        output.message(f"detached; the run goes on; islandctl status {watcher.run}")
        raise typer.Exit(130) from None


def end(watcher: Watcher, status: RunStatus) -> int:
    """After a followed run has ended: end its relay and tunnels, say so, and give the exit code.

    A failed run keeps its relay only as long as this takes as well: everything it knows is in its files.
    """
    from islandctl.runs.record import load, load_plan_of
    from islandctl.runs.stop import stop

    record = load(watcher.run)
    if record.phase == "launched":
        report = stop(
            record, load_plan_of(record), output.message, deadline_s=0.0, reason=status.detail or status.state
        )
        for line in report.lines:
            output.message(line)
        return exit_code(status) or report.exit_code
    return exit_code(status)


def exit_code(status: RunStatus) -> int:
    """0 for a run that finished, 1 for one that failed or was stopped before its end."""
    return 0 if status.state == "finished" else RunError.exit_code


def _live(watcher: Watcher) -> RunStatus:
    from rich.live import Live

    console = output.console()
    with Live(console=console, auto_refresh=False, transient=False) as screen:
        while True:
            status = watcher.look()
            screen.update(status_view(status), refresh=True)
            if status.ended:
                return status
            time.sleep(PAUSE_S)


def _plain(watcher: Watcher, quiet: bool) -> RunStatus:
    lines = Lines()
    while True:
        status = watcher.look()
        for line in lines.new(status):
            print(line, file=sys.stderr if quiet else sys.stdout, flush=True)
        if status.ended:
            if not quiet:
                output.console().print(status_view(status))
            return status
        time.sleep(PAUSE_S)


class Lines:
    """What is new since the last look, as plain lines: one an evaluation, one a change of state."""

    def __init__(self) -> None:
        self._state = ""
        self._steps: dict[int, int] = {}

    def new(self, status: RunStatus) -> Iterator[str]:
        """Lines for what this look shows and the last one did not."""
        if status.state != self._state:
            self._state = status.state
            yield f"{status.run}: {status.state}" + (f": {status.detail}" if status.detail else "")
        for cell in status.cells:
            for step, bits in cell.bits_per_byte:
                if step <= self._steps.get(cell.cell, -1):
                    continue
                self._steps[cell.cell] = step
                line = f"{cell.name}: step {step}/{status.steps}  {bits:.4f} bits per byte"
                if cell.tokens_per_s:
                    line += f"  {count(cell.tokens_per_s)} tokens/s"
                if status.eta_s is not None:
                    line += f"  ETA {duration(status.eta_s)}"
                yield line
