"""The cells on their nodes: their files, their supervisors' start and end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

from islandctl.config import secrets
from islandctl.config.beside import unpacked
from islandctl.config.paths import CellFolder, RunFolder
from islandctl.fleet import node as nodes
from islandctl.fleet.bundle import Bundle, pack
from islandctl.fleet.job import SupervisorJob, SupervisorState
from islandctl.fleet.provision import copy_code
from islandctl.fleet.scheduler import Scheduler
from islandctl.planner.plan import Plan
from islandctl.runs.jobs import STOP_TIMEOUT_S, cell_job, worker_job
from islandctl.runs.reach import Reach, Say, Verdict, demand, each
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.relay import cell_token

Group = tuple[NodeRecord, ...]
"""Nodes that their site's scheduler handles together: one node, or all of a cell."""


def script_bundle(plan: Plan) -> Bundle | None:
    """The user's own code, where a script of theirs trains."""
    return pack({name: unpacked(text) for name, text in plan.files.items()}, "script") if plan.files else None


def write_cells(record: RunRecord, plan: Plan, reach: Reach) -> None:
    """Write every cell's files on all its nodes, and clear what an earlier attempt said in the end.

    Raises:
        UnreachableError, PreflightError: names every node that could not be prepared.
    """
    ca = (RunFolder.of(record.run).secrets / "ca.pem").read_bytes()
    script, values = script_bundle(plan), secrets.values(plan.recipe.worker.secrets)

    def write(group: Group) -> None:
        node = group[0]
        host = reach.host(node.site, node.host)
        folder = CellFolder(PurePosixPath(node.cell_folder))
        job = cell_job(record, plan, record.cells[node.cell])
        # state.json as well: a supervisor that was lost must not hand its old restarts and verdict to the new one
        names = ("exit.json", "stop", "spent", "state.json")
        gone = [f"node-{one.index}/{name}" for one in group for name in names]
        if node.index == 0:  # the cell's folder is shared by its nodes
            gone.append(folder.outcome.name)
        files = {
            folder.job.name: (job.model_dump_json(indent=1).encode(), 0o600),
            folder.token.name: (cell_token(record.run, node.cell), 0o600),
            folder.ca.name: (ca, 0o600),
        }
        if values.keys() >= {*plan.recipe.worker.secrets} and values:
            files[folder.secrets.name] = (json.dumps(values).encode(), 0o600)
        nodes.write_files(host, folder.root, files, gone=gone)
        if script is not None:
            copy_code(host, node.work_dir, script, str(folder.script))

    demand(each(groups(record, record.nodes, reach), write), "writing the cells' files")


def start_workers(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> None:
    """Begin a supervisor on every node, or have the site's scheduler do so.

    Raises:
        UnreachableError, PreflightError, RunError: names every node where it did not start.
    """
    masters = {cell.index: _master(cell, reach) for cell in record.cells}

    def start(group: Group) -> None:
        scheduler, seats = _scheduler(group, reach), [reach.seat(node) for node in group]
        master = masters[group[0].cell]
        own = ["" if master is None else scheduler.address(seat) for seat in seats]
        jobs = [
            worker_job(record, plan, node, master=master, address=address)
            for node, address in zip(group, own, strict=True)
        ]
        if told := scheduler.start(seats, jobs):
            say(told)

    demand(each(groups(record, record.nodes, reach), start), "starting the workers")


def restart_workers(group: Group, reach: Reach) -> None:
    """Begin supervisors anew, with the jobs that lie there. What their predecessors left saves and ends.

    Raises:
        UnreachableError, PreflightError, RunError: they could not be started.
    """
    seats = [reach.seat(node) for node in group]
    texts = [nodes.read(seat.host, f"{seat.folder}/job.json").data for seat in seats]
    jobs = [SupervisorJob.model_validate_json(text) for text in texts]
    _scheduler(group, reach).start(seats, jobs)


def stop_workers(record: RunRecord, reach: Reach, which: Sequence[NodeRecord]) -> list[Verdict[Group, None]]:
    """Have the supervisors end their workers, and wait until they have; one verdict a group."""

    def stop(group: Group) -> None:
        _scheduler(group, reach).stop([reach.seat(node) for node in group], STOP_TIMEOUT_S + 15.0)

    return each(groups(record, which, reach), stop)


def supervisors(record: RunRecord, reach: Reach) -> list[Verdict[NodeRecord, SupervisorState]]:
    """What the supervisors of all nodes do; one verdict a node, in the record's order."""
    verdicts = each(groups(record, record.nodes, reach), lambda group: states_of(group, reach))
    found = {
        node: Verdict(node, value=verdict.value[at] if verdict.value else None, error=verdict.error)
        for verdict in verdicts
        for at, node in enumerate(verdict.item)
    }
    return [found[node] for node in record.nodes]


def states_of(group: Group, reach: Reach) -> list[SupervisorState]:
    """What the supervisors of one group do.

    Raises:
        UnreachableError, PreflightError: they cannot be asked.
    """
    return _scheduler(group, reach).states([reach.seat(node) for node in group])


def groups(record: RunRecord, which: Sequence[NodeRecord], reach: Reach) -> list[Group]:
    """Nodes as their schedulers take them: each by itself, or with all of its cell, where one of these is wanted."""
    found = []
    for node in which:
        if reach.scheduler(node.site, node.host).as_one:
            found.append(record.cells[node.cell].nodes)
        else:
            found.append((node,))
    return list(dict.fromkeys(found))


def _scheduler(group: Group, reach: Reach) -> Scheduler:
    return reach.scheduler(group[0].site, group[0].host)


def _master(cell: CellRecord, reach: Reach) -> tuple[str, int] | None:
    """Where the nodes of a cell meet. None for one node, and where they find that out themselves."""
    if len(cell.nodes) == 1:
        return None
    scheduler, first = _scheduler(cell.nodes, reach), reach.seat(cell.nodes[0])
    address = scheduler.address(first)
    return (address, nodes.free_port(first.host, address)) if address else None
