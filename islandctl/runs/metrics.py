"""A cell's ``metrics.jsonl`` read as a heartbeat: what the status shows while the relay cannot tell. Pure."""

from __future__ import annotations

import json
from typing import Any

from islandctl.relay.messages import UNSAVED, Heartbeat

MAX_EVALUATIONS = 60


def heartbeat_from(content: bytes, *, cell: int, attempt: int, steps: int, begins_at: int = 0) -> Heartbeat | None:
    """The newest known figures in ``attempt``; None when the lines hold none.

    An attempt that has no lines yet has done what the ones before it did up to the step that it begins at.

    Args:
        content: the file's end. The first line may be cut, and so may the last.
        steps: the cell's, of the whole run.
        begins_at: its step at the joint checkpoint that ``attempt`` went back to.
    """
    last: dict[str, dict[str, Any]] = {}
    trained: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, float] = {}
    newest = ""
    saved: dict[str, Any] = {}
    for line in content.split(b"\n"):
        entry = _entry(line)
        if entry is None or entry["attempt"] > attempt:
            continue
        if entry["kind"] == "eval" and isinstance(entry.get("bits_per_byte"), (int, float)):
            evaluations[entry["step"]] = float(entry["bits_per_byte"])
        if entry["kind"] == "train":
            trained[entry["step"]] = entry
        if entry["attempt"] == attempt:
            if entry["kind"] == "start":  # a life of the workers begins: what the one before said last is over
                last.clear()
            newest = entry["kind"]
            last[newest] = entry
            saved = entry if newest == "checkpoint" else saved  # what could not be written stays so over lives
    if not last and not trained and not evaluations:
        return None
    # a worker that ends before it is restored tells 0
    step = max((entry["step"] for kind, entry in last.items() if kind != "end" or entry["step"]), default=begins_at)
    train, exchange = last.get("train", {}), last.get("exchange", {})
    known = train or trained.get(step, {})
    ended = last.get("end", {}).get("outcome")
    state: Any = ended if ended in ("finished", "stopped", "failed") else "training" if train else "starting"
    message = f"{UNSAVED} {saved['step']}: {saved['error']}" if saved.get("error") else ""
    waits = newest == "waiting"
    if waits:
        state, message = "waiting", f"waits: {last[newest].get('reason', '')}"
    return Heartbeat(
        attempt=attempt,
        cell=cell,
        state=state,
        step=step,
        steps=steps,
        tokens=int(known.get("tokens", 0)),
        tokens_per_s=0.0 if waits else float(train.get("tokens_per_s") or 0.0),
        loss=known.get("loss"),
        bits_per_byte=tuple(sorted((s, b) for s, b in evaluations.items() if s <= step))[-MAX_EVALUATIONS:],
        rounds_applied=int(exchange.get("rounds_applied", 0)),
        rounds_skipped=int(exchange.get("rounds_skipped", 0)),
        rounds_late=int(exchange.get("rounds_late", 0)),
        message=message,
        life=str(last.get("start", {}).get("life", "")),
    )


def newest_time(content: bytes) -> float | None:
    """When the newest whole line was written: seconds since 1970, by the site's clock. None: no line tells."""
    for line in reversed(content.split(b"\n")):
        entry = _entry(line)
        if entry is not None and isinstance(entry.get("time"), (int, float)):
            return float(entry["time"])
    return None


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    whole = all(isinstance(entry.get(key), int) for key in ("attempt", "step"))
    return entry if whole else None
