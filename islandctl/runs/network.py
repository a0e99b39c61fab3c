"""Who reaches the relay how: its start, and the tunnels of nodes that cannot reach it by themselves.

The relay listens on loopback, or on all addresses where the recipe names the one that sites use. A local site
reaches a relay on the controller over loopback. Where the recipe names the address, other nodes use it. Everybody
else gets a tunnel kept on the controller, so that no site needs an open port. A relay on another host is reached by
the controller through a tunnel as well.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from islandctl.config.host_address import parse_address
from islandctl.config.paths import RunFolder, known_hosts
from islandctl.errors import IslandError
from islandctl.fleet import node as nodes
from islandctl.fleet import supervisor, tunnel
from islandctl.fleet.bundle import make_bundle
from islandctl.fleet.host import Host
from islandctl.fleet.needs import RELAY_NEEDS
from islandctl.fleet.provision import prepare
from islandctl.planner.plan import Plan
from islandctl.runs import record as records
from islandctl.runs.reach import Reach, Say, Verdict, demand, each
from islandctl.runs.record import KeptRecord, NodeRecord, RunRecord, TunnelRecord
from islandctl.runs.relay import address, own_code, own_python, relay_files, relay_job, wait_until_it_answers

CONTROLLER = "controller"
TUNNEL_TIMEOUT_S = 60.0
_LIVE = ("starting", "running", "backoff")
TO_RELAY = "relay"
"""Name of the tunnel through which the controller reaches a relay elsewhere."""


def start_relay(record: RunRecord, plan: Plan, reach: Reach, say: Say, *, measure: bool = False) -> RunRecord:
    """Write the relay's files, start it, and learn its port; the port stays the same for the whole run.

    Args:
        measure: it also serves the doctor's measurements.
    """
    settings = plan.recipe.relay
    relay, folder = _place(record, plan, reach, say)
    host = reach.beside(relay.host)
    record = records.change(record, relay=relay)
    listen = _listen(settings.address)
    nodes.write_files(host, folder, relay_files(record, plan, host=listen, port=settings.port or 0, measure=measure))
    nodes.start(host, relay.supervisor, relay.python, relay.folder, relay_job(record, relay))
    _, port = address(host, str(folder))
    nodes.write_files(host, folder, relay_files(record, plan, host=listen, port=port, measure=measure))
    if relay.host:
        there = nodes.free_port(reach.beside(""))
        way = TunnelRecord(name=TO_RELAY, host=relay.host, reverse=False, host_port=port, local_port=there)
        record = _open(record, reach, way)
        record = records.change(record, relay_url=f"https://127.0.0.1:{there}", relay_port=port)
    else:
        record = records.change(record, relay_url=f"https://127.0.0.1:{port}", relay_port=port)
    wait_until_it_answers(record, host)
    say(f"relay: answers at {record.relay_url}")
    return record


def start_tunnels(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> RunRecord:
    """Give every node its way to the relay, through a tunnel where it has no other.

    Raises:
        HostKeyError, UnreachableError, PreflightError: names each node to which no tunnel can be opened.
    """
    record, opened = open_tunnels(record, plan, reach, say)
    demand(opened, "opening the tunnels")
    return record


def open_tunnels(
    record: RunRecord, plan: Plan, reach: Reach, say: Say
) -> tuple[RunRecord, list[Verdict[NodeRecord, str]]]:
    """As ``start_tunnels``; and what became of each tunnel: the relay's address there, or why it cannot be opened.

    A node without a way to the relay keeps an empty address in the record.
    """
    settings = plan.recipe.relay
    far = record.relay is not None and record.relay.host != ""
    here = int(record.relay_url.rpartition(":")[2])
    direct = f"https://{_bracketed(settings.address)}:{record.relay_port}" if settings.address else ""
    urls: dict[tuple[str, str], str] = {}
    behind: dict[tuple[str, str], NodeRecord] = {}
    for node in record.nodes:
        if plan.site(node.site).scheduler == "local" and not (far and direct):
            urls[node.site, node.host] = record.relay_url
        elif direct:
            urls[node.site, node.host] = direct
        else:
            behind.setdefault((node.site, node.host), node)

    def way(node: NodeRecord) -> tuple[str, TunnelRecord]:
        port = nodes.free_port(reach.host(node.site, node.host))
        url, porch = _way_in(node, port, plan, reach)
        return url, TunnelRecord(
            name=f"{node.site}-{node.index}",
            site=node.site,
            host=node.host,
            reverse=True,
            host_port=port,
            local_port=here,
            porch=porch,
        )

    ways = each(list(behind.values()), way)
    found = [(one.item, *one.value) for one in ways if one.value is not None]
    # Recorded first, then opened: what is recorded is found and ended again, whatever happens in between.
    record = records.change(record, tunnels=(*record.tunnels, *(one for _, _, one in found)))

    def begin(one: tuple[NodeRecord, str, TunnelRecord]) -> None:
        node, _, made = one
        _start_tunnel(record, reach, made)
        say(f"{node.label}: goes to the relay through a tunnel")

    begun = each(found, begin)
    opened = [Verdict[NodeRecord, str](one.item, error=one.error) for one in ways if one.error is not None]
    opened += [Verdict(one.item[0], None if one.error else one.item[1], one.error) for one in begun]
    urls |= {(one.item.site, one.item.host): one.value for one in opened if one.value is not None}

    def routed(node: NodeRecord) -> NodeRecord:
        return node.model_copy(update={"relay_url": urls.get((node.site, node.host), "")})

    cells = tuple(cell.model_copy(update={"nodes": tuple(map(routed, cell.nodes))}) for cell in record.cells)
    return records.change(record, cells=cells), opened


def await_tunnels(record: RunRecord, reach: Reach) -> None:
    """See that the nodes' ways to the relay stand, before workers are started that would wait for it.

    Raises:
        PreflightError, UnreachableError: names each node that has none.
    """

    def wait(way: TunnelRecord) -> None:
        folder = RunFolder.of(record.run).tunnels / way.name
        tunnel.await_reverse(
            reach.beside(""), reach.host(way.site, way.host), folder, way.host_port, TUNNEL_TIMEOUT_S
        )

    demand(each([way for way in record.tunnels if way.reverse], wait), "waiting for the tunnels")


def silent(record: RunRecord, reach: Reach) -> list[str]:
    """Names of relay and tunnels that nothing keeps any more."""
    assert record.relay is not None
    kept = [("relay", reach.beside(record.relay.host), record.relay.folder)]
    kept += [(f"tunnel {one.name}", reach.beside(""), _tunnel_folder(record, one.name)) for one in record.tunnels]
    return [name for name, host, folder in kept if nodes.state(host, folder).state not in _LIVE]


def restart_relay(record: RunRecord, reach: Reach, say: Say) -> None:
    """Have relay and tunnels run, with all that they hold: start again what does not."""
    assert record.relay is not None
    host = reach.beside(record.relay.host)
    if nodes.state(host, record.relay.folder).state not in _LIVE:
        say("relay: starting again")
        relay = record.relay
        nodes.start(host, relay.supervisor, relay.python, relay.folder, relay_job(record, relay))

    def again(way: TunnelRecord) -> None:
        if nodes.state(reach.beside(""), _tunnel_folder(record, way.name)).state not in _LIVE:
            say(f"tunnel {way.name}: starting again")
            _start_tunnel(record, reach, way)

    demand(each(record.tunnels, again), "starting the tunnels")
    wait_until_it_answers(record, host)


def _place(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> tuple[KeptRecord, PurePosixPath]:
    """Where the relay will run, and its folder there. On another host that is prepared first."""
    name = plan.recipe.relay.host
    if name == CONTROLLER:
        folder = PurePosixPath(RunFolder.of(record.run).relay)
        python, code, keeper = own_python(), own_code(), str(Path(supervisor.__file__).resolve())
    else:
        host = _relay_host(name, plan, reach)
        made = prepare(host, reach.profile_beside(name), make_bundle(), say, needs=RELAY_NEEDS)
        folder = PurePosixPath(made.work_dir) / "runs" / record.mark / "relay"
        python, code, keeper = made.python, made.code, made.supervisor
    host_name = "" if name == CONTROLLER else name
    return (
        KeptRecord(
            name="relay", host=host_name, python=python, code=code, supervisor=keeper, folder=str(folder / "node-0")
        ),
        folder,
    )


def _relay_host(name: str, plan: Plan, reach: Reach) -> Host:
    """The relay's host, connected. An error names the key that sent us there."""
    try:
        return reach.beside(name)
    except IslandError as error:
        recipe = next(iter(plan.sources), f"recipe {plan.recipe.name}")
        raise type(error)(f"{recipe}: relay.host: {error.message}", hint=error.hint) from error


def _way_in(node: NodeRecord, port: int, plan: Plan, reach: Reach) -> tuple[str, tuple[str, ...]]:
    """The relay's address at the end of a tunnel, and what passes connections on to it from behind a login node.

    Args:
        port: where the tunnel ends on the host's loopback, which only the host itself reaches.
    """
    if plan.site(node.site).hosts_are_nodes:
        return f"https://127.0.0.1:{port}", ()
    host = reach.host(node.site, node.host)
    public = nodes.free_port(host, "0.0.0.0")  # noqa: S104
    name = host.python(
        "import socket\ndef main(args, payload):\n    return socket.gethostname()\n", {}, timeout_s=30.0
    )
    program = f"{node.code}/islandctl/fleet/porch.py"
    return f"https://{name}:{public}", (node.python, program, str(public), str(port))


def _open(record: RunRecord, reach: Reach, way: TunnelRecord) -> RunRecord:
    """Record a tunnel, then open it: what is recorded is found and ended again, whatever happens in between."""
    record = records.change(record, tunnels=(*record.tunnels, way))
    _start_tunnel(record, reach, way)
    return record


def _start_tunnel(record: RunRecord, reach: Reach, way: TunnelRecord) -> None:
    folder = RunFolder.of(record.run)
    make = tunnel.reverse_tunnel if way.reverse else tunnel.forward_tunnel
    more = {"command": way.porch} if way.porch else {}
    made = make(
        way.host,
        reach.ssh(way.site, way.host),
        run=record.run,
        mark=record.mark,
        folder=folder.tunnels / way.name,
        known_hosts=known_hosts(),
        host_port=way.host_port,
        local_port=way.local_port,
        **more,
    )
    here: Host = reach.beside("")
    tunnel.open_tunnel(here, str(Path(supervisor.__file__).resolve()), own_python(), made)


def _tunnel_folder(record: RunRecord, name: str) -> str:
    return str(RunFolder.of(record.run).tunnels / name)


def _listen(public: str | None) -> str:
    """The address to listen at: loopback, unless sites come in from outside (TLS and tokens guard it there)."""
    if public is None:
        return "127.0.0.1"
    return "::" if parse_address(public).is_ipv6 else "0.0.0.0"  # noqa: S104


def _bracketed(public: str | None) -> str:
    return parse_address(public).bracketed if public else ""
