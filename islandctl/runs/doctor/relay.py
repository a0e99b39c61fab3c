"""The relay of an examination: the real one, where the recipe places it, reached as a run would reach it.

While it lasts it is a run of its own in the records, so that one which was cut short is seen by ``islandctl runs``
and ended by ``islandctl stop``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from islandctl.config.paths import CellFolder, RunFolder
from islandctl.errors import IslandError, PreflightError
from islandctl.fleet import node as nodes
from islandctl.fleet.checks.base import Link, Node, Way, source
from islandctl.fleet.checks.meeting import held_words
from islandctl.planner.plan import Plan
from islandctl.planner.wan import STREAMS_PER_RANK, tunnelled
from islandctl.runs import record as records
from islandctl.runs.network import CONTROLLER, start_relay, start_tunnels
from islandctl.runs.reach import Reach, Say
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.relay import cell_token, make_secrets
from islandctl.runs.stop import end_everything

MOST_STREAMS = 16


def begin(record: RunRecord, plan: Plan, reach: Reach, present: Sequence[Node], say: Say) -> RunRecord:
    """Start relay and tunnels for the nodes that answer.

    Raises:
        PreflightError, UnreachableError: the relay cannot be started where the recipe wants it.
    """
    _check_port(plan, reach)
    make_secrets(record, plan)
    record = records.change(record, cells=_cells(record, plan, present))
    record = start_relay(record, plan, reach, say, measure=True)
    return start_tunnels(record, _login_nodes_as_nodes(plan), reach, say)


def _login_nodes_as_nodes(plan: Plan) -> Plan:
    """Of a Slurm site the login node is measured, and only it has to reach the tunnel's end."""
    sites = [
        site.model_copy(update={"scheduler": "ssh"}) if site.scheduler == "slurm" else site for site in plan.sites
    ]
    return plan.model_copy(update={"sites": tuple(sites)})


def _check_port(plan: Plan, reach: Reach) -> None:
    """A port that the recipe fixes must be free; who holds it is told."""
    wanted = plan.recipe.relay
    if wanted.port is None:
        return
    host = reach.beside("" if wanted.host == CONTROLLER else wanted.host)
    address = "127.0.0.1" if wanted.address is None else "::" if ":" in wanted.address else "0.0.0.0"  # noqa: S104
    asked = {"do": "can_bind", "address": address, "port": wanted.port}
    bound = host.python(source("on_node.py"), asked, timeout_s=30.0)
    if not bound["free"]:
        raise PreflightError(
            f"{host.label}: relay.port {wanted.port}: {held_words(bound)}",
            hint="end what holds the port, or set another relay.port in the recipe",
        )


def _cells(record: RunRecord, plan: Plan, present: Sequence[Node]) -> tuple[CellRecord, ...]:
    """The plan's cells with those of their nodes that answer, each host once. Their folders are never made."""
    left = {(node.site.name, node.name) for node in present}
    cells = []
    for cell in plan.cells:
        members = []
        work_dir = plan.site(cell.site).work_dir
        folder = CellFolder(PurePosixPath(work_dir) / "runs" / record.mark / cell.name)
        for node in cell.nodes:
            if (cell.site, node.host) not in left:
                continue
            left.discard((cell.site, node.host))
            members.append(
                NodeRecord(
                    cell=cell.index,
                    index=node.index,
                    site=cell.site,
                    host=node.host,
                    num_ranks=node.num_ranks,
                    python="python3",
                    code="",
                    supervisor="",
                    work_dir=work_dir,
                    cell_folder=str(folder.root),
                    folder=str(folder.node(node.index)),
                )
            )
        cells.append(CellRecord(index=cell.index, name=cell.name, site=cell.site, nodes=tuple(members)))
    return tuple(cells)


def links(record: RunRecord, plan: Plan, present: Sequence[Node]) -> list[Link]:
    """Each site's way to the relay that was started."""
    certificate = (RunFolder.of(record.run).secrets / "ca.pem").read_text()
    known = {(node.site.name, node.name): node for node in present}
    made = []
    for site in plan.sites:
        ways = tuple(
            Way(known[site.name, node.host], node.relay_url, cell_token(record.run, node.cell).decode())
            for node in record.nodes
            if node.site == site.name
        )
        if ways:
            streams = min(MOST_STREAMS, STREAMS_PER_RANK * site.gpu.count)
            far = tunnelled(site, plan.recipe)
            made.append(Link(site, ways, certificate, far, streams, lambda way: _trouble(record, way)))
    return made


def _trouble(record: RunRecord, way: Way) -> str:
    """The last word of the node's tunnel; empty: it has none, or nothing to say."""
    for one in record.tunnels:
        if (one.site, one.host) != (way.node.site.name, way.node.name):
            continue
        for path in sorted((RunFolder.of(record.run).tunnels / one.name / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines() if path.name != "supervisor.log" else []
            said = [line for line in lines if "failed" in line.lower() or "denied" in line.lower()]
            if said:
                return said[-1].strip()
    return ""


def end(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> list[str]:
    """End relay and tunnels, prove that nothing is left, and forget the record. Gives what could not be cleared."""
    record = records.load(record.run)
    left: list[str] = []
    if record.relay is not None:
        # the nodes were only asked: nothing of ours was ever started there
        report = end_everything(record.model_copy(update={"cells": ()}), plan, reach, say)
        left = [
            *report.troubles,
            *(f"left: {one}" for one in report.left),
            *(f"unknown: {one}" for one in report.unknown),
        ]
        if record.relay.host and not left:
            data = PurePosixPath(record.relay.folder).parent
            try:
                nodes.remove(reach.beside(record.relay.host), data.parents[2], data, emptied=True)
            except IslandError as error:
                left.append(error.message)
    if left:
        records.change(record, phase="failed", reason="the doctor could not clear up", launcher_pid=0)
        return [*left, f"islandctl stop {record.run} tries again"]
    _forget(RunFolder.of(record.run).root)
    return []


def _forget(folder: Path) -> None:
    doomed = folder.with_name(f".{folder.name}.gone")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
