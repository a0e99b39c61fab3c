"""What a run has shown, read from the files that it leaves: each cell's metrics, the ledger, the relay's counters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from islandctl.config.model import Model
from islandctl.ledger.entries import Commit, Entry
from islandctl.planner.fragments import FragmentSize

Line = Mapping[str, Any]
Round = tuple[int, int, int]
"""Attempt, fragment, and the version that it led to."""


class Counted(Model):
    """What the relay has counted of one cell, since it was started last."""

    packets: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class CellShown(Model):
    """What one cell has shown. What is None the files do not tell."""

    cell: str
    steps: int = 0
    """Of which the time is known."""
    step_s: float | None = None
    """Seconds of a step that waits for nothing: the median."""
    memory_bytes: int | None = None
    """Peak of rank 0."""
    exchange_s: float | None = None
    """Seconds from the last cell's snapshot until the result is there: the slowest fragment's median."""
    rounds: int = 0
    """Of which the time is known."""
    sent: float | None = None
    """Bytes a window, packet headers included."""
    fetched: float | None = None
    failures: int = 0
    """Starts of the workers that nobody had asked for."""
    hours: float = 0.0
    """That the workers were there."""


def parse_lines(content: bytes) -> list[dict[str, Any]]:
    """Whole lines of a ``metrics.jsonl``; a cut one at either end is left out."""
    lines = []
    for text in content.split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and all(key in line for key in ("kind", "attempt", "step", "time")):
            lines.append(line)
    return lines


def cell_shown(cell: str, lines: Sequence[Line]) -> CellShown:
    """What the cell's own lines tell; for the rest see ``with_rounds`` and ``with_bytes``."""
    steps = _step_times(lines)
    attempts: dict[int, list[Line]] = {}
    for line in lines:
        attempts.setdefault(line["attempt"], []).append(line)
    starts = sum(max(0, sum(line["kind"] == "start" for line in own) - 1) for own in attempts.values())
    peaks = [line["peak_bytes"] for line in lines if isinstance(line.get("peak_bytes"), int)]
    return CellShown(
        cell=cell,
        steps=len(steps),
        step_s=median(steps) if steps else None,
        memory_bytes=max(peaks, default=None),
        failures=starts,
        hours=sum(own[-1]["time"] - own[0]["time"] for own in attempts.values()) / 3600,
    )


def _step_times(lines: Sequence[Line]) -> list[float]:
    """Seconds from one step's line to the next, where nothing came between and no round was applied."""
    times, before = [], None
    applied = {(line["attempt"], line["step"]) for line in lines if line["kind"] == "exchange"}
    for line in lines:
        if line["kind"] != "train":
            before = None if line["kind"] != "exchange" else before
            continue
        follows = before is not None and (before["attempt"], before["step"] + 1) == (line["attempt"], line["step"])
        if before is not None and follows and (line["attempt"], line["step"]) not in applied:
            times.append(line["time"] - before["time"])
        before = line
    return [seconds for seconds in times if seconds > 0]


def round_times(lines: Sequence[Line]) -> dict[Round, float]:
    """Seconds of each round in one cell, by (attempt, fragment, version that it led to)."""
    times: dict[Round, float] = {}
    last: dict[int, float] = {}
    for line in lines:
        told, versions = line.get("round_s"), line.get("versions")
        if line["kind"] == "exchange" and isinstance(told, list) and isinstance(versions, list):
            for fragment, (seconds, version) in enumerate(zip(told, versions, strict=False)):
                if seconds is not None and seconds != last.get(fragment):  # every line repeats the last round's
                    times[line["attempt"], fragment, version] = last[fragment] = float(seconds)
    return times


def with_rounds(shown: Sequence[CellShown], times: Sequence[Mapping[Round, float]]) -> list[CellShown]:
    """Seconds of a round, without what the faster cells wait for the slowest one's snapshot: of all cells' times for
    one round the least."""
    least: dict[Round, float] = {}
    for own in times:
        for key, seconds in own.items():
            least[key] = min(seconds, least.get(key, seconds))
    by_fragment: dict[int, list[float]] = {}
    for (_, fragment, _), seconds in least.items():
        by_fragment.setdefault(fragment, []).append(seconds)
    slowest = max((median(seconds) for seconds in by_fragment.values()), default=None)
    return [one.model_copy(update={"exchange_s": slowest, "rounds": len(least)}) for one in shown]


def with_bytes(
    shown: Sequence[CellShown],
    counted: Sequence[Counted],
    entries: Iterable[Entry],
    fragments: Sequence[FragmentSize],
    *,
    windows: range,
) -> list[CellShown]:
    """Bytes of a window, by what the relay has counted for the rounds that the ledger names.

    What travels whole, after a warm-up and at the end of a run, is taken off. A relay counts from its last start on:
    where it was started anew, its counters are taken as those of the newest rounds that have so many packets.

    Args:
        windows: the regular ones; in all others values travel whole.
    """
    rounds = [entry for entry in entries if isinstance(entry, Commit) and entry.named][::-1]
    window_up = sum(one.with_headers(one.encoded_bytes) for one in fragments)
    told = []
    for cell, (one, seen) in enumerate(zip(shown, counted, strict=True)):
        sent = _Traffic(fragments, windows)
        fetched = _Traffic(fragments, windows)
        for commit in rounds:
            names = {part.cell for part in commit.named}
            if cell in names:
                if sent.packets >= seen.packets:
                    break
                sent.add(commit, 1)
            if commit.pair is None or cell in commit.pair:
                fetched.add(commit, len(names - {cell}))
        if not sent.usual or not seen.packets:
            told.append(one)
            continue
        part = seen.packets / sent.packets
        partners = fetched.usual / sent.usual
        told.append(
            one.model_copy(
                update={
                    "sent": window_up * (seen.bytes_up / part - sent.whole) / sent.usual,
                    "fetched": window_up * partners * (seen.bytes_down / part - fetched.whole) / fetched.usual
                    if fetched.usual
                    else None,
                }
            )
        )
    return told


class _Traffic:
    """Packets and their planned bytes of some rounds: the usual ones, and those that travel whole."""

    def __init__(self, fragments: Sequence[FragmentSize], windows: range) -> None:
        self._fragments, self._windows = fragments, windows
        self.packets = self.usual = self.whole = 0

    def add(self, commit: Commit, copies: int) -> None:
        fragment = self._fragments[commit.fragment]
        self.packets += copies * fragment.num_chunks
        if commit.window in self._windows:
            self.usual += copies * fragment.with_headers(fragment.encoded_bytes)
        else:
            self.whole += copies * fragment.with_headers(fragment.whole_bytes)
