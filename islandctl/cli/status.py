"""``islandctl status``: how a run goes, once or again and again."""

from __future__ import annotations

from typing import Annotated

import typer

from islandctl.cli.options import Json, RunName, flag


def status(
    run: RunName = None,
    watch: Annotated[bool, flag("--watch", "-w", help="Keep looking until the run ends or Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show how a run goes: steps, bits per byte, speed, rounds, checkpoints.

    Ends with 5 when nobody answers: then the state is unknown, not failed. With --watch and --json: one JSON object
    a line, about one a second.

    Examples:
      islandctl status
      islandctl status demo-1 --watch
      islandctl status demo-1 --json | jq '.cells[0].step'
      islandctl status demo-1 --json --watch | jq -c '[.state, .step]'
    """
    from islandctl.runs.record import load

    record = load(run)
    from islandctl.cli import output  # from here on it costs time, which nobody waits for when there is no run
    from islandctl.cli.follow import follow, json_lines
    from islandctl.cli.look import StatusView
    from islandctl.errors import UnreachableError
    from islandctl.runs.gather import Watcher

    with Watcher(record, output.message) as watcher:
        if watch:
            _ = json_lines(watcher) if json else follow(watcher, then_ended=False)
            return
        view = watcher.look()
    if json:
        output.as_json(view)
    else:
        output.console().print(StatusView(view), crop=False)
    if view.state == "unknown":
        raise typer.Exit(UnreachableError.exit_code)
