"""What ``launch`` and ``resume`` do once the workers are started: follow the run to its end, or leave it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from islandctl.runs.record import RunRecord


def attend(record: RunRecord, *, detach: bool, json: bool) -> None:
    """Follow a run that has just been started.

    Args:
        detach: look once (where ``json`` wants a document), and return.
        json: the last status as one document on stdout, and nothing else there.

    Raises:
        typer.Exit: the run has ended; with the command's exit code.
    """
    from islandctl.cli import output
    from islandctl.cli.follow import end, follow
    from islandctl.runs.gather import Watcher

    with Watcher(record, output.message) as watcher:
        if detach:
            if json:
                output.as_json(watcher.look())
            return
        status = follow(watcher, quiet=json)
        code = end(watcher, status)
    if json:
        output.as_json(status)
    raise typer.Exit(code)
