"""Many growing log files as one stream of whole lines: pure, bytes in, lines out."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from islandctl.errors import UsageError

_TIME = re.compile(rb"(\d{4}-\d{2}-\d{2})[T ](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,6}))?(Z|[+-]\d{2}:?\d{2})?")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Line:
    """One whole log line and where it comes from."""

    source: str
    """For example ``east/node-0/rank-0``."""
    site: str
    rank: int | None
    """None: not of one rank."""
    at: float
    """Seconds since the epoch; a line without a time has that of the line before it, or at the beginning of a file
    that of the first line with one."""
    text: str


class Tail:
    """One file's end: takes bytes as they come, gives whole lines, holds a partial last line back.

    Args:
        before: the piece of the same log that this one follows; a line without a time has that of the line before.
    """

    def __init__(self, source: str, site: str, rank: int | None, offset: int = 0, before: Tail | None = None) -> None:
        self.source = source
        self.site = site
        self.rank = rank
        self.offset = offset
        """Where the next read starts: all bytes before it have been fed."""
        self._partial = b""
        self._clock: list[float] = [0.0] if before is None else before._clock
        """Of the last line that told a time; one for all pieces of a log."""

    def feed(self, offset: int, content: bytes) -> list[Line]:
        """Take ``content``, which starts at ``offset`` in the file, and give the lines that are whole now.

        Bytes that were fed before are skipped; so a read that is repeated after a lost link doubles nothing.

        Raises:
            ValueError: there is a gap between what was fed and ``offset``.
        """
        if offset > self.offset:
            raise ValueError(f"{self.source}: bytes {self.offset} to {offset} were not read")
        fresh = content[self.offset - offset :]
        self.offset += len(fresh)
        *whole, self._partial = (self._partial + fresh).split(b"\n")
        lines = [self._line(line) for line in whole]
        first = next((line.at for line in lines if line.at), 0.0)
        return [line if line.at else replace(line, at=first) for line in lines]

    def before(self, content: bytes) -> None:
        """What stands before ``offset`` and is not shown: it may tell the time of first lines that have none."""
        times = (line_time(line) for line in reversed(content.split(b"\n")))
        self._clock[0] = next(filter(None, times), 0.0)

    def restart(self) -> None:
        """The file is a new one (it is shorter than what was read): begin again at its start."""
        self.offset, self._partial = 0, b""

    def rest(self) -> list[Line]:
        """The held-back last line, once nothing more will come."""
        partial, self._partial = self._partial, b""
        return [self._line(partial)] if partial else []

    def _line(self, raw: bytes) -> Line:
        self._clock[0] = line_time(raw) or self._clock[0]
        text = raw.decode(errors="replace").rstrip("\r")
        return Line(source=self.source, site=self.site, rank=self.rank, at=self._clock[0], text=text)


def merge(batches: Iterable[Sequence[Line]]) -> list[Line]:
    """Lines of several files in order of time; the order inside each file stays as it is."""
    numbered = [
        (line.at, batch, index, line) for batch, lines in enumerate(batches) for index, line in enumerate(lines)
    ]
    # a file's own order wins over a clock that was set back: the key is the running maximum inside each file
    keyed = []
    newest: dict[int, float] = {}
    for at, batch, index, line in numbered:
        newest[batch] = max(newest.get(batch, 0.0), at)
        keyed.append((newest[batch], batch, index, line))
    return [line for *_, line in sorted(keyed, key=lambda item: item[:3])]


def last(lines: Iterable[Line], count: int) -> list[Line]:
    """The last ``count`` lines."""
    return list(deque(lines, maxlen=count))


def line_time(raw: bytes) -> float | None:
    """The time near a line's beginning (first 40 bytes), as seconds since the epoch. Without a zone: UTC."""
    match = _TIME.search(raw[:60])
    if match is None or match.start() > 40:
        return None
    day, clock, fraction, zone = (part.decode() if part else "" for part in match.groups())
    text = f"{day}T{clock}.{fraction or '0':0<6}" + ("+00:00" if zone in ("", "Z") else zone)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def since_time(text: str, now: float) -> float:
    """``10min``, ``2 h`` (that long ago) or a UTC time to seconds since the epoch.

    Raises:
        UsageError: neither of both.
    """
    span = _SPAN.fullmatch(text.strip())
    if span:
        return now - float(span[1]) * _SECONDS[span[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UsageError(
            f"--since {text}: neither a span nor a time", hint="write for example 10min, 2h or 2030-01-31T12:00:00"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
