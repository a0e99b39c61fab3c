"""The cells on their nodes: their files, their supervisors' start and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from islandctl.config.paths import CellFolder, RunFolder
from islandctl.errors import PreflightError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorJob
from islandctl.planner.plan import Plan
from islandctl.runs.jobs import STOP_TIMEOUT_S, cell_job, worker_job
from islandctl.runs.reach import Reach, Verdict, demand, each
from islandctl.runs.record import NodeRecord, RunRecord
from islandctl.runs.relay import cell_token

_ADDRESS = """
import socket
def main(args, payload):
    # no packet is sent: connecting a datagram socket only asks the routing table which address would be used
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((target, 9))
                return sock.getsockname()[0]
            except OSError:
                continue
    return None
"""


def write_cells(record: RunRecord, plan: Plan, reach: Reach) -> None:
    """Write every cell's files on all its nodes, and clear what an earlier attempt said in the end.

    Raises:
        UnreachableError, PreflightError: names every node that could not be prepared.
    """
    ca = (RunFolder.of(record.run).secrets / "ca.pem").read_bytes()

    def write(node: NodeRecord) -> None:
        host = reach.host(node.site, node.host)
        folder = CellFolder(PurePosixPath(node.cell_folder))
        job = cell_job(record, plan, record.cells[node.cell])
        nodes.write_files(
            host,
            folder.root,
            {
                folder.job.name: (job.model_dump_json(indent=1).encode(), 0o600),
                folder.token.name: (cell_token(record.run, node.cell), 0o600),
                folder.ca.name: (ca, 0o600),
            },
        )
        if plan.recipe.worker.command is not None:
            script = {name: (text.encode(), 0o644) for name, text in plan.files.items()}
            nodes.write_files(host, folder.script, script)
        # state.json as well: a supervisor that was lost must not hand its old restarts and verdict to the new one
        gone = [PurePosixPath(node.folder) / name for name in ("exit.json", "stop", "spent", "state.json")]
        if node.index == 0:  # the cell's folder is shared by its nodes
            gone.append(folder.outcome)
        for path in gone:
            nodes.remove(host, node.work_dir, path)

    demand(each(record.nodes, write), "writing the cells' files")


def start_workers(record: RunRecord, plan: Plan, reach: Reach) -> None:
    """Begin a supervisor on every node.

    Raises:
        UnreachableError, PreflightError, RunError: names every node where it did not start.
    """
    masters = {cell.index: _master(record, cell.index, reach) for cell in record.cells}

    def start(node: NodeRecord) -> None:
        host = reach.host(node.site, node.host)
        own = _address(host) if masters[node.cell] is not None else ""
        job = worker_job(record, plan, node, master=masters[node.cell], address=own)
        nodes.start(host, node.supervisor, node.python, node.folder, job)

    demand(each(record.nodes, start), "starting the workers")


def restart_workers(node: NodeRecord, reach: Reach) -> None:
    """Begin a supervisor anew on one node, with the job that lies there. What its predecessor left saves and ends.

    Raises:
        UnreachableError, PreflightError, RunError: it could not be started.
    """
    host = reach.host(node.site, node.host)
    job = SupervisorJob.model_validate_json(nodes.read(host, f"{node.folder}/job.json").data)
    nodes.start(host, node.supervisor, node.python, node.folder, job)


def stop_workers(record: RunRecord, reach: Reach, which: Sequence[NodeRecord]) -> list[Verdict[NodeRecord, None]]:
    """Have the supervisors end their workers, and wait until they have; one verdict a node."""

    def stop(node: NodeRecord) -> None:
        nodes.stop(reach.host(node.site, node.host), node.folder, STOP_TIMEOUT_S + 15.0)

    return each(which, stop)


def _master(record: RunRecord, cell: int, reach: Reach) -> tuple[str, int] | None:
    """Where the nodes of a cell meet: an address of node 0 and a port that is free there. None for one node."""
    members = record.cells[cell].nodes
    if len(members) == 1:
        return None
    host = reach.host(members[0].site, members[0].host)
    address = _address(host)
    return address, nodes.free_port(host, address)


def _address(host: Host) -> str:
    """The host's own, by which its peers reach it: a name would be looked up by each of them.

    Raises:
        PreflightError: it has none.
    """
    address = host.python(_ADDRESS, {}, timeout_s=30.0)
    if not address:
        raise PreflightError(
            f"{host.label}: the node has no address that its peers could reach", hint="check its network interfaces"
        )
    return str(address)
