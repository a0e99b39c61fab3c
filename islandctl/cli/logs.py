"""``islandctl logs``: the logs of all ranks as one stream."""

from __future__ import annotations

from typing import Annotated

import typer

from islandctl.cli.options import RunName, flag


def logs(
    run: RunName = None,
    follow: Annotated[bool, flag("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    site: Annotated[
        list[str] | None, typer.Option("--site", metavar="NAME", help="Only this site; can be repeated.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, metavar="N", help="Only this rank; can be repeated.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="Only lines since 10min, 2h, or a UTC time.")
    ] = None,
    json: Annotated[bool, flag("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show the workers' logs of all sites as one stream, in order of time.

    Examples:
      islandctl logs --tail 50
      islandctl logs demo-1 -f --site east --rank 0
      islandctl logs demo-1 --since 10min
    """
    import sys
    import time
    from json import dumps

    from islandctl.cli import output
    from islandctl.cli.look import SITE_COLOURS
    from islandctl.config.secrets import hide
    from islandctl.runs import secrets
    from islandctl.runs.logs import LogReader
    from islandctl.runs.merge import Line, since_time
    from islandctl.runs.record import load, load_plan_of

    record = load(run)
    plan = load_plan_of(record)
    secrets.know(plan)
    start = since_time(since, time.time()) if since else None
    codes = {"cyan": 36, "yellow": 33, "green": 32, "magenta": 35, "blue": 34, "red": 31}
    names = [one.name for one in plan.sites]
    lively = output.lively(sys.stdout)

    def show(line: Line) -> None:
        text = hide(line.text)
        if json:
            told = {"source": line.source, "site": line.site, "rank": line.rank, "at": line.at, "text": text}
            print(dumps(told))
            return
        colour = codes[SITE_COLOURS[names.index(line.site) % len(SITE_COLOURS)]]
        prefix = f"\x1b[{colour}m{line.source}\x1b[0m" if lively else line.source
        print(f"{prefix} | {text}")

    with LogReader(record, plan, output.message, sites=site or (), ranks=rank or ()) as reader:
        try:
            lines = reader.first(tail=tail, since=start, final=not follow)
            for line in lines:
                show(line)
            if not lines and tail != 0 and not reader.unreachable:
                output.message(f"{record.run}: no such log line yet")
            sys.stdout.flush()
            while follow:
                time.sleep(0.5)
                for line in reader.more():
                    if start is None or line.at >= start:
                        show(line)
                sys.stdout.flush()
        except KeyboardInterrupt:
            output.message(f"detached; the run goes on; islandctl status {record.run}")
            raise typer.Exit(130) from None
        if reader.unreachable:
            from islandctl.errors import UnreachableError

            raise UnreachableError("some logs could not be read: " + "; ".join(reader.unreachable))
