"""The relay of an examination: the real one, where the recipe places it, reached as a run would reach it.

While it lasts it is a run of its own in the records, so that one which was cut short is seen by ``islandctl runs``
and ended by ``islandctl stop``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from islandctl.config.paths import CellFolder, RunFolder
from islandctl.errors import IslandError, PreflightError
from islandctl.fleet import node as nodes
from islandctl.fleet.checks.base import Link, Node, Way, source
from islandctl.fleet.checks.meeting import held_words
from islandctl.planner.plan import Plan
from islandctl.planner.wan import STREAMS_PER_RANK, tunnelled
from islandctl.runs import record as records
from islandctl.runs.network import CONTROLLER, open_tunnels, start_relay
from islandctl.runs.reach import Reach, Say, each
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.relay import cell_token, make_secrets
from islandctl.runs.stop import end_everything

MOST_STREAMS = 16
REACH_S, EACH_S = 30.0, 5.0
"""For a tunnel behind a login node to come up; for one of its names to answer."""


def begin(
    record: RunRecord, plan: Plan, reach: Reach, present: Sequence[Node], say: Say
) -> tuple[RunRecord, dict[str, IslandError]]:
    """Start relay and tunnels for the nodes that answer; those of a job go through their login node, as in a run.

    Returns:
        The record; and by ``site/host`` why no tunnel can be opened there. Nodes behind it have no link.

    Raises:
        PreflightError, UnreachableError: the relay cannot be started where the recipe wants it.
    """
    _check_port(plan, reach)
    make_secrets(record, plan)
    record = records.change(record, cells=_cells(record, plan, present))
    record = start_relay(record, plan, reach, say, measure=True)
    login = {node.site.name for node in present if node.kind == "login"}
    record, opened = open_tunnels(record, _login_nodes_as_nodes(plan, login), reach, say)
    return record, {one.item.label: one.error for one in opened if one.error is not None}


def _login_nodes_as_nodes(plan: Plan, which: Collection[str]) -> Plan:
    """Of these sites the login node is measured, and only it has to reach the tunnel's end."""
    sites = [site.model_copy(update={"scheduler": "ssh"}) if site.name in which else site for site in plan.sites]
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
    """The plan's cells with those hosts through which nodes answer, each once. Cells' folders are never made."""
    left = {(node.site.name, node.through) for node in present}
    visits = {visit.site: visit.folder for visit in record.visits}
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
                    code=visits.get(cell.site, ""),
                    supervisor="",
                    work_dir=work_dir,
                    cell_folder=str(folder.root),
                    folder=str(folder.node(node.index)),
                )
            )
        cells.append(CellRecord(index=cell.index, name=cell.name, site=cell.site, nodes=tuple(members)))
    return tuple(cells)


def links(
    record: RunRecord, plan: Plan, present: Sequence[Node], login: Mapping[str, Sequence[str]] | None = None
) -> list[Link]:
    """Each site's way to the relay that was started: of those nodes that have one.

    Args:
        login: of Slurm sites whose nodes are asked in a job, the names by which they may know their login node.
    """
    doors = {(node.site, node.host): node for node in record.nodes if node.relay_url}
    present = [node for node in present if (node.site.name, node.through) in doors]
    behind = [node for node in present if node.kind == "job" and plan.recipe.relay.address is None]
    url = {node.site: node.relay_url for node in record.nodes}

    def find(node: Node) -> str:
        return _reached(node, url[node.site.name], (login or {}).get(node.site.name, ()))

    found = each(behind, find)
    urls = {one.item.label: one.value for one in found if one.value}
    certificate = (RunFolder.of(record.run).secrets / "ca.pem").read_text()
    made = []
    for site in plan.sites:
        ways = tuple(
            Way(node, urls.get(node.label, door.relay_url), cell_token(record.run, door.cell).decode())
            for node in present
            if node.site.name == site.name
            for door in [doors[site.name, node.through]]
        )
        if ways:
            streams = min(MOST_STREAMS, STREAMS_PER_RANK * site.gpu.count)
            far = tunnelled(site, plan.recipe)
            made.append(Link(site, ways, certificate, far, streams, lambda way: _trouble(record, way)))
    return made


def _reached(node: Node, url: str, names: Sequence[str]) -> str:
    """The relay's address as a node behind a login node reaches it: by the first of its names that answers, as in a
    run. Where none does, the one that was given: asking there tells why."""
    port, end = urlsplit(url).port, time.monotonic() + REACH_S
    while time.monotonic() < end:
        targets = [[name, port] for name in names]
        told = node.ask("dial", timeout_s=EACH_S * len(names), targets=targets, each_s=EACH_S)["answers"]
        for name, one in zip(names, told, strict=True):
            if "error" not in one:
                return f"https://{f'[{name}]' if ':' in name else name}:{port}"
        time.sleep(0.5)
    return url


def _trouble(record: RunRecord, way: Way) -> str:
    """The last word of the node's tunnel; empty: it has none, or nothing to say."""
    for one in record.tunnels:
        if (one.site, one.host) != (way.node.site.name, way.node.through):
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
    if record.relay is not None or record.visits:
        # the nodes were only asked: nothing of ours was ever started there
        report = end_everything(record.model_copy(update={"cells": ()}), plan, reach, say)
        left = [
            *report.troubles,
            *(f"left: {one}" for one in report.left),
            *(f"unknown: {one}" for one in report.unknown),
        ]
        try:
            if record.relay is not None and record.relay.host and not left:
                data = PurePosixPath(record.relay.folder).parent
                nodes.remove(reach.beside(record.relay.host), data.parents[2], data, emptied=True)
            for visit in record.visits if not left else ():
                nodes.remove(reach.host(visit.site, visit.host), visit.work_dir, visit.folder, emptied=True)
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
