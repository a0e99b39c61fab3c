"""The run's checkpoints: what the ledger says, what lies on the nodes, and whether it is whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from islandctl.config.model import Model
from islandctl.config.paths import CellFolder
from islandctl.errors import HostKeyError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.ledger.entries import ENTRY, Entry
from islandctl.ledger.joint import JointCheckpoint, Unjoined, joint_checkpoints, unjoined
from islandctl.runs.reach import Reach, Say, each, told
from islandctl.runs.record import CellRecord, RunRecord
from islandctl.runs.relay import client

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan
    from islandctl.relay.client import RelayClient

VERIFY_TIMEOUT_S = 1800.0
"""Hashing a checkpoint of a large model from shared storage takes minutes."""
_NAME = re.compile(r"step-(\d{8,})-attempt-(\d+)")

_VERIFY = """
import json, os
from blake3 import blake3
def main(args, payload):
    root, found = os.path.join(args["cell_folder"], "checkpoints"), []
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    for name in names:
        if not name.startswith("step-%08d-attempt-" % args["step"]):
            continue
        faults = check(os.path.join(root, name), args["manifest"])
        if not faults:
            return []
        found += ["%s: %s" % (name, fault) for fault in faults]
    return found or ["there is no checkpoint of step %d in %s" % (args["step"], root)]
def check(folder, expected):
    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            content = file.read()
    except OSError as error:
        return ["manifest.json: %s" % error.strerror]
    if blake3(content).hexdigest() != expected:
        return ["manifest.json is not the one that the ledger names"]
    faults = []
    for record in json.loads(content.decode())["files"]:
        name = record["name"]
        path = os.path.join(folder, os.path.basename(name))
        try:
            size = os.path.getsize(path)
            hasher = blake3(max_threads=blake3.AUTO)
            hasher.update_mmap(path)
        except OSError as error:
            faults.append("%s: %s" % (name, error.strerror))
            continue
        if size != record["size_bytes"]:
            faults.append("%s has %d bytes instead of %d" % (name, size, record["size_bytes"]))
        elif hasher.hexdigest() != record["hash"]:
            faults.append("%s does not match its hash" % name)
    return faults
"""


class Row(Model):
    """One step with checkpoints."""

    step: int
    """At which they were written."""
    attempt: int
    """In which."""
    joint: bool
    """The ledger says that every cell had it whole."""
    resumable: bool = False
    """It is joint, and lies with every cell now: `resume` can go back to it."""
    held_by: tuple[str, ...] = ()
    """Cells on whose nodes it lies."""
    note: str = ""
    """Why it cannot be gone back to."""


class Survey(Model):
    """All checkpoints of a run."""

    run: str
    """Its name."""
    rows: tuple[Row, ...]
    """Oldest first."""
    unreachable: tuple[str, ...] = ()
    """Cells that could not be asked, each with the reason."""


def verify(record: RunRecord, reach: Reach, joint: JointCheckpoint) -> list[str]:
    """Check a joint checkpoint on all its nodes, every byte of it. Gives what is wrong; empty: it is whole.

    Raises:
        UnreachableError, HostKeyError: a node cannot be asked, so nothing can be said.
    """

    def check(cell: CellRecord) -> list[str]:
        node = cell.nodes[0]
        host = reach.host(node.site, node.host)
        args = {"cell_folder": node.cell_folder, "step": joint.step, "manifest": joint.manifests[cell.index]}
        found: list[str] = host.python(_VERIFY, args, timeout_s=VERIFY_TIMEOUT_S, interpreter=node.python)
        return [f"{cell.name}: {fault}" for fault in found]

    faults: list[str] = []
    for verdict in each(record.cells, check):
        if isinstance(verdict.error, UnreachableError | HostKeyError):
            raise verdict.error
        faults += [told(verdict.item.name, verdict.error)] if verdict.error else verdict.value or []
    return faults


def read_ledger(relay: RelayClient) -> list[Entry]:
    """The whole ledger from the relay."""
    entries: list[Entry] = []
    while batch := relay.entries(entries[-1].seq if entries else -1, 0.0):
        entries += batch
    return entries


def ledger_of(record: RunRecord, reach: Reach) -> list[Entry]:
    """The whole ledger: from the relay, or from its file when the relay does not answer.

    Raises:
        UnreachableError: neither can be read.
    """
    try:
        with client(record) as relay:
            return read_ledger(relay)
    except UnreachableError:
        return ledger_from_file(record, reach)


def ledger_from_file(record: RunRecord, reach: Reach) -> list[Entry]:
    """The ledger as its file has it; empty when there is none yet.

    Raises:
        UnreachableError: the relay's host does not answer.
    """
    if record.relay is None:
        return []
    folder = PurePosixPath(record.relay.folder).parent
    return parse_ledger(_whole(reach, record.relay.host, str(folder / "ledger.jsonl")))


def parse_ledger(content: bytes) -> list[Entry]:
    """Entries of a ledger file; a line that is still being written is left out."""
    *lines, _ = content.split(b"\n")
    return [ENTRY.validate_json(line) for line in lines if line.strip()]


def _whole(reach: Reach, host_name: str, path: str) -> bytes:
    host, content = reach.beside(host_name), b""
    while True:
        piece = nodes.read(host, path, len(content))
        content += piece.data
        if not piece.data or len(content) >= piece.size:
            return content


def survey(record: RunRecord, plan: Plan, say: Say) -> Survey:
    """What the ledger and the nodes know of the run's checkpoints."""
    with Reach(plan, record.run, say) as reach:
        entries = ledger_of(record, reach)
        held: dict[tuple[int, int], list[str]] = {}
        lost = []
        for verdict in each(record.cells, lambda cell: _held(cell, reach)):
            if verdict.error is not None:
                lost.append(told(verdict.item.name, verdict.error))
                say(lost[-1])
            for key in verdict.value or ():
                held.setdefault(key, []).append(verdict.item.name)
    names = [cell.name for cell in record.cells]
    joint = joint_checkpoints(entries, len(names))
    rows = rows_of(joint, unjoined(entries, names), held, names, all_asked=not lost)
    return Survey(run=record.run, rows=tuple(rows), unreachable=tuple(lost))


def rows_of(
    joint: Sequence[JointCheckpoint],
    rest: Sequence[Unjoined],
    held: dict[tuple[int, int], list[str]],
    cells: Sequence[str],
    *,
    all_asked: bool = True,
) -> list[Row]:
    """One row a step that is of interest: what can be gone back to, and what lies on nodes besides.

    What a cell has tidied away since (``checkpoint.keep``) is left out, unless nothing newer can be gone back to.

    Args:
        held: (attempt, step) → cells that have it whole by its name.
        cells: all cells.
        all_asked: every cell has told what it holds; else absence proves nothing.
    """
    rows = {}
    for one in joint:
        key = (one.attempt, one.step)
        missing = [name for name in cells if name not in held.get(key, [])]
        note = f"{'gone from' if all_asked else 'not seen on'} {', '.join(missing)}" if missing else ""
        rows[key] = Row(
            step=one.step,
            attempt=one.attempt,
            joint=True,
            resumable=not missing,
            held_by=tuple(held.get(key, ())),
            note=note,
        )
    for other in rest:
        key = (other.attempt, other.step)
        held_by = tuple(held.get(key, ()))
        rows[key] = Row(step=other.step, attempt=other.attempt, joint=False, held_by=held_by, note=other.reason)
    for key, names in held.items():
        if key not in rows:
            note = "not of the run's present line"
            rows[key] = Row(step=key[1], attempt=key[0], joint=False, held_by=tuple(names), note=note)
    newest = max((row.step for row in rows.values() if row.resumable), default=0)
    shown = [row for row in rows.values() if row.held_by or row.step >= newest or not all_asked]
    return sorted(shown, key=lambda row: (row.step, row.attempt))


def _held(cell: CellRecord, reach: Reach) -> list[tuple[int, int]]:
    node = cell.nodes[0]
    stored = nodes.list_checkpoints(
        reach.host(node.site, node.host), CellFolder(PurePosixPath(node.cell_folder)).root
    )
    return [key for one in stored if one.manifest is not None and (key := _key(one.name))]


def _key(name: str) -> tuple[int, int] | None:
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None
