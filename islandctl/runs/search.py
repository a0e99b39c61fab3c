"""The proof that nothing is left: every host where a process of the run may live is searched for the run's mark, and
every scheduler for its jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from islandctl.config.model import Model
from islandctl.config.paths import RunFolder
from islandctl.errors import RunError, UnreachableError
from islandctl.planner.plan import Plan
from islandctl.runs.network import CONTROLLER
from islandctl.runs.reach import Reach, each, told
from islandctl.runs.record import RunRecord

Place = tuple[str, str]
"""Site and host, as ``Reach.at`` takes them."""
HERE: Place = ("", "")


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
        return lines + ([f"nothing of {self.run} is left on {', '.join(self.hosts)}"] if self.hosts else [])


def places(record: RunRecord, plan: Plan) -> list[Place]:
    """Where a process of the run may live; a host is left out on which nothing was ever started."""
    relay = record.relay.host if record.relay else ""
    return _places(plan, relay, nodes_too=record.reached_workers)


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


def search(run: str, mark: str, where: Sequence[Place], reach: Reach, *, end: bool) -> Found:
    """Search hosts for processes that carry the mark.

    Args:
        end: end what is found, and search again.
    """

    def look(place: Place) -> tuple[str, list[str]]:
        host = reach.at(*place)
        return host.label, reach.scheduler(*place).left(host, mark, end=end)

    left, unknown, clean = [], [], []
    for verdict in each(where, look):
        if verdict.value is None:
            unknown.append(told("/".join(filter(None, verdict.item)) or "this machine", verdict.error))
            continue
        label, found = verdict.value
        left += [f"{label}: {one}" for one in found]
        clean += [] if found else [label]
    return Found(run=run, left=tuple(left), unknown=tuple(unknown), hosts=tuple(dict.fromkeys(clean)))


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
