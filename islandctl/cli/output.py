"""Where output goes: data to stdout, messages to stderr; colour and motion only where a person looks."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from islandctl.config.secrets import hide
from islandctl.errors import IslandError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

WIDTH = 100
"""Columns that all output fits in."""


_COMMAND = re.compile(
    r"(?<![\w/.-])islandctl(?= "
    r"(?:plan|compare|doctor|launch|status|logs|stop|resume|runs|checkpoints|remove|schema|--help)\b)"
)


def forgiving() -> None:
    """Let a terminal that is not UTF-8 show a question mark where it has no sign, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def typeable(text: str) -> str:
    """``text`` with its commands as they can be typed here: by path, when ``islandctl`` is not on the PATH."""
    from shutil import which

    called = sys.argv[0]
    if os.path.basename(called) != "islandctl":
        return text
    found = which("islandctl")
    if found is not None and os.path.exists(called) and os.path.samefile(found, called):
        return text
    near = os.path.relpath(called)
    return _COMMAND.sub(lambda _: called if near.startswith("..") else near, text)


def lively(stream: TextIO) -> bool:
    """May this stream have colour and motion? Only a terminal, and not when NO_COLOR is set or TERM is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(stream: TextIO | None = None) -> Console:
    """A rich console on stdout (or ``stream``), at most :data:`WIDTH` columns wide."""
    from rich.console import Console

    target = stream or sys.stdout
    live = lively(target)
    made = Console(
        file=target,
        force_terminal=live,
        no_color=not live,
        highlight=False,
        markup=False,  # a reason may hold brackets and colons, which are what they are
        emoji=False,
        color_system="auto" if live else None,
        width=None if target.isatty() else WIDTH,
    )
    made.width = min(made.width, WIDTH)
    return made


def data(line: str) -> None:
    """One line of data, to stdout."""
    print(shown(line))


def as_json(value: BaseModel | Any) -> None:
    """One JSON document, to stdout."""
    from pydantic import BaseModel

    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    print(json.dumps(_finite(plain), indent=2, ensure_ascii=False, allow_nan=False))


def as_json_line(value: BaseModel) -> None:
    """One JSON document on one line, to stdout at once."""
    print(json.dumps(_finite(value.model_dump(mode="json")), ensure_ascii=False, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    """JSON has no word for an infinite loss or one that is no number: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def message(text: str) -> None:
    """One line for the person, to stderr."""
    print(shown(text), file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """``text`` as a person may see it: commands that can be typed here, no secret."""
    return hide(typeable(text))


def error(problem: IslandError) -> None:
    """An error of ours in one line, and what to do about it in a second one."""
    red, end = ("\x1b[1;31m", "\x1b[0m") if lively(sys.stderr) else ("", "")
    message(f"{red}error:{end} {problem.message}")
    if problem.hint:
        message(f"hint: {problem.hint}")


def border_trouble(problem: OSError) -> IslandError | None:
    """Said plainly, when it is the output, islandctl's own folder or a full disk; None: something else."""
    import errno

    from islandctl.config.paths import HOME_VARIABLE, home
    from islandctl.errors import IslandError, PreflightError, UsageError

    place, cause = str(problem.filename or ""), str(problem.strerror).lower()
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if full and not place:  # every file of ours is named: see ``runs.files``
        hush()
        return IslandError(f"the output could not be written: {cause}")
    if full:
        return PreflightError(
            f"this machine: {place}: {cause}", hint=f"free some space, or move {HOME_VARIABLE} elsewhere"
        )
    if place.startswith(str(home())) or str(home()).startswith(place or "\0"):
        return UsageError(f"{place}: {cause}", hint=f"set {HOME_VARIABLE} to a folder that can be written")
    return None


def fault(problem: BaseException) -> None:
    """An exception that nobody foresaw: one line, with the file that holds the traceback."""
    import time
    import traceback

    from islandctl.config.paths import home
    from islandctl.runs.files import write_whole

    first = str(problem).partition("\n")[0]
    text = f"{type(problem).__name__}: {first}" if first else type(problem).__name__
    path = home() / "faults" / time.strftime(f"%Y%m%dT%H%M%S-{os.getpid()}.txt", time.gmtime())
    try:
        write_whole(path, hide("".join(traceback.format_exception(problem))).encode())
    except OSError as trouble:
        message(f"error: {text} (its traceback could not be saved: {trouble})")
        return
    message(f"error: {text}")
    message(f"hint: this is a fault of islandctl; its traceback lies in {path}")


def hush(*streams: TextIO) -> None:
    """Let nothing more be written to these streams, also not at exit; stdout if none is named."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in streams or (sys.stdout,):
        os.dup2(sink, stream.fileno())
    os.close(sink)
