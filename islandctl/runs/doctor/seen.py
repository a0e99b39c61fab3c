"""Which accelerators a node had when it was last examined: a rented node that comes back may be the same bad one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from islandctl.config.paths import home
from islandctl.fleet.checks.base import Verdict, listed, ok, warn
from islandctl.runs.files import write_whole


def compared(now: Mapping[str, Sequence[str]]) -> dict[str, Verdict]:
    """Hold each node's UUIDs against those of the last time, and keep them for the next.

    Args:
        now: ``site/host`` → UUIDs; nodes without any are left out.
    """
    path = home() / "doctor" / "accelerators.json"
    try:
        before: dict[str, list[str]] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        before = {}
    told = {label: list(uuids) for label, uuids in now.items() if uuids}
    if told and told != {label: before.get(label) for label in told}:
        write_whole(path, json.dumps({**before, **told}, indent=1).encode())
    return {label: judge_seen(uuids, before.get(label)) for label, uuids in told.items()}


def judge_seen(now: Sequence[str], before: Sequence[str] | None) -> Verdict:
    """``before``: None: the node was never examined."""
    if before is None:
        return ok(f"first seen: {listed([uuid[:12] for uuid in now])}")
    new = [uuid[:12] for uuid in now if uuid not in before]
    gone = [uuid[:12] for uuid in before if uuid not in now]
    if new or gone:
        return warn(
            f"others than last time: new {listed(new) or 'none'}, gone {listed(gone) or 'none'}",
            hint="another machine behind the same name? its host key, disk and speed may be others too",
        )
    return ok("the same as last time")
