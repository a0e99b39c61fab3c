"""``islandctl status``."""

from __future__ import annotations

from typing import Annotated

import typer


def status(
    run: Annotated[str | None, typer.Argument(help="The run; left out: the newest one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking until the run ends or Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show how a run goes: cells, steps, bits per byte, speed, rounds, the last joint checkpoint.

    Ends with 5 when nobody answers: then the state is unknown, not failed.

    Examples:

      islandctl status

      islandctl status demo-1 --watch

      islandctl status demo-1 --json | jq .cells[0].step
    """
    from islandctl.runs.record import load

    record = load(run)
    from islandctl.cli import output  # from here on it costs time, which nobody waits for when there is no run
    from islandctl.cli.follow import follow
    from islandctl.cli.look import status_view
    from islandctl.errors import UnreachableError
    from islandctl.runs.gather import Watcher

    with Watcher(record, output.message) as watcher:
        if watch and not json:
            follow(watcher)
            return
        view = watcher.look()
    if json:
        output.as_json(view)
    else:
        output.console().print(status_view(view))
    if view.state == "unknown":
        raise typer.Exit(UnreachableError.exit_code)
