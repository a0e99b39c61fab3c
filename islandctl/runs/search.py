"""The proof that nothing is left: every host where a process of the run may live is searched for the run's mark, and
every scheduler for its jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from islandctl.config.model import Model
from islandctl.config.paths import RunFolder
from islandctl.errors import RunError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.planner.plan import Plan
from islandctl.runs.network import CONTROLLER
from islandctl.runs.reach import Reach, each, told
from islandctl.runs.record import RunRecord

Place = tuple[str, str]
"""Site and host, as ``Reach.at`` takes them."""
HERE: Place = ("", "")
NO_ACCELERATOR = "no accelerator here"
PORTS_FREE = "its ports are free"


class Found(Model):
    """What a search has found."""

    run: str
    """Its name."""
    left: tuple[str, ...] = ()
    """Processes that are still there, each with its place."""
    unknown: tuple[str, ...] = ()
    """Hosts that could not be asked, each with the reason."""
    hosts: tuple[str, ...] = ()
    """Hosts that were searched and are clean."""
    resources: tuple[str, ...] = ()
    """Of each host that is clean: the run's ports and its accelerators' memory are free, or which process, not of the
    run, holds them."""

    @property
    def exit_code(self) -> int:
        """5 when the state of a host is unknown, 1 when something is left, else 0."""
        if self.unknown:
            return UnreachableError.exit_code
        return RunError.exit_code if self.left else 0

    @property
    def lines(self) -> list[str]:
        """The findings for people."""
        lines = [f"left: {one}" for one in self.left]
        lines += [f"unknown: {one}" for one in self.unknown]
        lines += [f"nothing of {self.run} is left on {', '.join(self.hosts)}"] if self.hosts else []
        return lines + [one for one in self.resources if not one.endswith((NO_ACCELERATOR, PORTS_FREE))]


def places(record: RunRecord, plan: Plan) -> list[Place]:
    """Where a process of the run may live; a host is left out on which nothing was ever started."""
    relay = record.relay.host if record.relay else ""
    found = _places(plan, relay, nodes_too=record.reached_workers)
    return list(dict.fromkeys([*found, *((visit.site, visit.host) for visit in record.visits)]))


def everywhere(plan: Plan) -> list[Place]:
    """Where a run of this plan may have a process, however far its launch came."""
    relay = plan.recipe.relay.host
    return _places(plan, "" if relay == CONTROLLER else relay, nodes_too=True)


def _places(plan: Plan, relay: str, *, nodes_too: bool) -> list[Place]:
    found = [HERE]
    if relay:  # under the name of the site that lists it, so that no host is searched twice
        found.append((next((site.name for site in plan.sites if relay in site.hosts), ""), relay))
    if nodes_too:
        found += [(cell.site, node.host) for cell in plan.cells for node in cell.nodes if node.host]
    return list(dict.fromkeys(found))


def search(
    run: str, mark: str, where: Sequence[Place], reach: Reach, *, end: bool, record: RunRecord | None = None
) -> Found:
    """Search hosts for processes that carry the mark, for listeners on the run's ports, and at accelerators' memory.

    Args:
        end: end the processes that are found, and search again.
        record: tells the ports; None: nobody knows them.
    """

    def look(place: Place) -> tuple[str, nodes.Remains, list[str], list[str]]:
        host, scheduler = reach.at(*place), reach.scheduler(*place)
        queued = scheduler.left(host, mark, end=end)
        folders, ports = _traces(record, place) if record is not None else ([], [])
        folders = [] if scheduler.as_one else folders  # what ran there ran on nodes that the scheduler has taken back
        found = nodes.remains(host, mark, folders, ports)
        if found.processes and end:
            nodes.end_leftovers(host, mark)
            found = nodes.remains(host, mark, folders, ports)
        return host.label, found, queued, [] if found.processes else _resources(found, worked=bool(folders))

    left, unknown, clean, resources = [], [], [], []
    for verdict in each(where, look):
        if verdict.value is None:
            unknown.append(told("/".join(filter(None, verdict.item)) or "this machine", verdict.error))
            continue
        label, found, queued, held = verdict.value
        left += [f"{label}: {one}" for one in queued]
        left += [f"{label}: process {one.pid} ({one.job}): {one.command}" for one in found.processes]
        clean += [] if found.processes or queued else [label]
        resources += [f"{label}: {one}" for one in held]
    return Found(
        run=run,
        left=tuple(left),
        unknown=tuple(unknown),
        hosts=tuple(dict.fromkeys(clean)),
        resources=tuple(dict.fromkeys(resources)),
    )


def _resources(found: nodes.Remains, *, worked: bool) -> list[str]:
    """Ports and accelerators of a host without a process of the run; ``worked``: workers ran there."""
    told = list(found.taken) or ([PORTS_FREE] if found.ports else [])
    if found.accelerators is not None:
        return told + (list(found.held) or [f"the memory of its {found.accelerators} accelerators is free"])
    return told + ([NO_ACCELERATOR] if worked else [])


def _traces(record: RunRecord, place: Place) -> tuple[list[str], list[int]]:
    """What the record tells of a place: supervisors' folders, and ports that relay and tunnels listened on."""
    folders = [node.folder for node in record.nodes if node.host and (node.site, node.host) == place]
    folders += [node.folder for node in record.nodes if not node.host and place == HERE]
    ports = [port for one in record.tunnels if one.host == place[1] for port in (one.host_port, *one.porch_ports)]
    if place == HERE:
        ports = [one.local_port for one in record.tunnels if not one.reverse]
        here = record.relay is not None and not record.relay.host
        ports += [port] if here and (port := urlsplit(record.relay_url).port) else []
    return folders, ports


def mark_in_files(run: str) -> str:
    """The mark of a run whose record cannot be read, from whatever else names it here; empty: nothing does.

    Every supervisor's job on this machine does. Without one nothing was started: the relay comes first, and a relay
    elsewhere is reached through a tunnel that is kept here.
    """
    folder = RunFolder.of(run)
    for path in (folder.record, *folder.root.glob("relay/*/job.json"), *folder.root.glob("tunnels/*/job.json")):
        try:
            named = re.search(rf'"({re.escape(run)}\.[0-9a-f]{{16}})"', path.read_text(errors="replace"))
        except OSError:
            continue
        if named:
            return named[1]
    return ""
