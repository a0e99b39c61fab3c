"""The work folder: may this user write there, does everything fit, and how fast is it?"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from islandctl.config.units import bytes_text, seconds_text
from islandctl.fleet.checks.base import (
    Cell,
    CellCheck,
    FleetCheck,
    Node,
    NodeCheck,
    Verdict,
    Verdicts,
    fail,
    listed,
    ok,
    skipped,
    unknown,
    warn,
)
from islandctl.fleet.delivery import Member

AT_ONCE = 32
LUSTRE_FULL, FULL = 0.80, 0.95
CHECKPOINTS = 2.2
"""Times a checkpoint that must fit at least: the last good one, the one being written, and some room."""
LEAST_FREE_BYTES = 200e6
SMALL_FILES = 100
SMALL_S = 2.0
"""For so many files, made, flushed and removed one after another; a local disk takes a tenth of it."""


class DiskSpace(NodeCheck):
    """Room and rights."""

    name, tier, title = "disk-space", "quick", "the work folder can be written without sudo, and everything fits"
    asks = ("host", "login", "job")
    threshold = "2.2 checkpoints free on the site, < 95 % used (Lustre < 80 %), inodes left"
    source = "ml-engineering (Lustre fails near 80 %), imbue cluster-health (95 %)"
    remedy = "free some space, or set work_dir in the profile to a folder of yours on another disk"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        told = node.ask("disk_space", program="on_disk.py", timeout_s=20.0)
        node.facts["disk"] = told
        told["shared"] = told.get("shared") or node.kind != "host"  # Slurm's nodes share it, whatever its type
        cells = node.wanted.cells / (1 if told["shared"] else node.site.num_nodes)
        saved = node.wanted.checkpoint_bytes
        return judge_space(told, need=None if saved is None else CHECKPOINTS * saved * cells)


def judge_space(told: dict[str, Any], *, need: float | None) -> Verdict:
    """Args: need: bytes that the run's checkpoints take at least of this disk; None: not known."""
    if "unfit" in told:
        hint = "set work_dir in the profile to a folder that you may write to there"
        return fail(f"cannot write into {told['work_dir']}: {told['unfit']}", hint=hint)
    free, used, kind = told["free_bytes"], told["used"], told["kind"]
    text = f"{bytes_text(free)} free of {bytes_text(told['total_bytes'])} ({used:.0%} used, {kind or 'unknown type'})"
    figures: dict[str, Any] = {"value": free, "unit": "B"}
    least = max(LEAST_FREE_BYTES, need or 0.0)
    if free < least:
        words = f"2.2 checkpoints take {bytes_text(need)}" if need else "less than 200 MB"
        return fail(f"{text}: {words}", threshold=bytes_text(least), **figures)
    if told["inodes"] and told["inodes_free"] < 1000:
        return fail(f"{text}: {told['inodes_free']} files (inodes) are left of {told['inodes']}", **figures)
    if used > (LUSTRE_FULL if kind == "lustre" else FULL):
        return warn(f"{text}: nearly full", **figures)
    return ok(text, **figures)


class OneFolder(CellCheck):
    """A cell's checkpoints lie in one folder as a whole; without one a launch is refused."""

    name, tier, title = "one-folder", "quick", "all nodes of a cell have one and the same work folder"
    threshold, source = "each node sees what the first one writes there", "a launch is refused otherwise"
    remedy = "set work_dir to a folder that all nodes of a cell share, or describe each node as a site of its own"

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        first, *others = (Member(node.open(), node.site.work_dir) for node in cell.nodes)
        with first.sign() as sign, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            seen = pool.map(lambda member: member.sees(sign), others)
            apart = [node.label for node, sees in zip(cell.nodes[1:], seen, strict=True) if not sees]
        what = f"what {cell.nodes[0].label} writes into {first.work_dir}"
        if apart:
            return fail(f"{what} is not seen on {listed(apart)}", value=len(apart), unit="nodes")
        return ok(f"{what} is seen on all others", value=0, unit="nodes")


class DiskRate(NodeCheck):
    """How fast checkpoints are written and come back; all nodes at the same time, as at a checkpoint."""

    name, tier, title = "disk-rate", "standard", "writing with fsync, reading back, small files"
    threshold, source = "storage.write and storage.read of the profile; 100 small files in 2 s", "proposed"
    remedy = "--write-profile puts the figures into the profile; or set work_dir to a faster disk"
    deadline_s = 90.0
    measures = True

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        seconds = min(node.wanted.seconds or (20.0 if node.tier == "deep" else 5.0), 30.0)
        asked = {"limit_bytes": 64 << 30, "seconds": seconds, "small_files": SMALL_FILES}
        told = node.ask("disk_rates", program="on_disk.py", timeout_s=70.0, **asked)
        node.facts["disk-rate"] = told
        return judge_rate(told)


def judge_rate(told: dict[str, Any]) -> Verdict:
    """One node's share; whether it is enough, the site's nodes tell together."""
    if "error" in told:
        return fail(
            f"cannot write: {told['error']}", hint="free some space, or set work_dir in the profile to another disk"
        )
    write, read = told["bytes"] / told["write_s"], told["bytes"] / max(told["read_s"], 1e-6)
    text = (
        f"write {bytes_text(write)}/s, read {bytes_text(read)}/s{' (from memory)' if told['cached'] else ''}, "
        f"{SMALL_FILES} small files {seconds_text(told['small_s'])}"
    )
    slow = told["small_s"] > SMALL_S
    return (warn if slow else ok)(text, value=write, unit="B/s", threshold=f"small files {seconds_text(SMALL_S)}")


class SiteStorage(FleetCheck):
    """The site's nodes together."""

    name, scope, tier, title = "storage", "site", "quick", "the site's storage as the plan sees it"
    threshold, source = "storage.write, storage.read and storage.free of the profile", "the plan reckons with them"
    remedy = "--write-profile puts the figures into the profile"

    def look(self, nodes: Sequence[Node]) -> Verdicts:
        """See ``FleetCheck``."""
        said = nodes[0].site.storage
        profile = {"write": said.write, "read": said.read, "free": said.free}
        seen = [node.facts["disk"] for node in nodes if "free_bytes" in node.facts.get("disk", {})]
        rates = [node.facts["disk-rate"] for node in nodes if "bytes" in node.facts.get("disk-rate", {})]
        whole = len(seen) == len(nodes)
        return judge_storage(seen if whole else [], rates if len(rates) == len(nodes) else [], profile)


def judge_storage(
    seen: list[dict[str, Any]], rates: list[dict[str, Any]], profile: dict[str, float | None]
) -> Verdict:
    """What all nodes have together, against the profile; empty lists: not all nodes have told."""
    measured: dict[str, float] = {}
    if seen:
        shared = len({one["mounted"] for one in seen}) == 1 and all(one["shared"] for one in seen)
        least = min(one["free_bytes"] for one in seen)
        measured["free"] = least if shared else least * len(seen)
    if rates:
        measured["write"] = sum(one["bytes"] / one["write_s"] for one in rates)
        if not any(one["cached"] for one in rates):
            measured["read"] = sum(one["bytes"] / max(one["read_s"], 1e-6) for one in rates)
    if not measured:
        return skipped("not all nodes have told (disk-space and disk-rate ask them)")
    parts, less = [], False
    for key, found in measured.items():
        unit = "" if key == "free" else "/s"
        parts.append(f"{key} {bytes_text(found)}{unit}")
        said = profile[key]
        if said is not None and found < 0.9 * said:
            parts[-1] += f" (profile: {bytes_text(said)}{unit})"
            less = True
    figures: dict[str, Any] = {"measured": {f"storage.{key}": value for key, value in measured.items()}}
    return (warn if less else ok)(", ".join(parts), **figures)


class ImportTime(NodeCheck):
    """How long torch takes to import: from a cold file system, and again."""

    name, tier, title = "import-time", "standard", "torch is imported twice: small files on the workers' environment"
    threshold, source = (
        "3 s the second time; 20 s the first",
        "ml-engineering: 20 to 120 s is a bad shared file system",
    )
    remedy = "set work_dir (or the environment) to a local disk, or a file system made for many small files"
    deadline_s = 330.0
    measures = True

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        took = []
        for _ in range(2):
            told = node.worker_python("imports", timeout_s=150.0)
            if "unbuilt" in told:
                return skipped("no environment is there yet: launch builds it")
            if "error" in told:
                return unknown(told["error"]) if told.get("late") else skipped(told["error"])
            took.append(told["took_s"])
        return judge_import(*took)


def judge_import(first_s: float, second_s: float) -> Verdict:
    """Seconds of both, the interpreter's own start included."""
    text = f"{seconds_text(first_s)}, then {seconds_text(second_s)}"
    slow = second_s > 3.0 or first_s > 20.0
    return (warn if slow else ok)(text, value=second_s, unit="s")
