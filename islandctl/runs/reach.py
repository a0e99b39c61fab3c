"""The hosts of one run: connected once, when first needed, and used side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from islandctl.config.paths import known_hosts
from islandctl.errors import HostKeyError, IslandError, PreflightError, UnreachableError
from islandctl.fleet.host import Host
from islandctl.fleet.local import LocalHost
from islandctl.fleet.scheduler import PlainHosts, Scheduler, Seat, scheduler_of
from islandctl.runs.record import NodeRecord, load, load_plan_of

if TYPE_CHECKING:
    from islandctl.config.site import SiteProfile, Ssh
    from islandctl.fleet.connect import Fleet
    from islandctl.fleet.hostkeys import Ask
    from islandctl.planner.plan import Plan

T = TypeVar("T")
R = TypeVar("R")
Say = Callable[[str], None]
"""Takes one line for the person who waits."""

MAX_AT_WORK = 64
_BESIDE = {
    "name": "relay",
    "scheduler": "ssh",
    "gpu": {"type": "cpu", "count": 1, "per_node": 1},
    "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "0 s"},
    "cpu": {"cores": 1, "memory": "1 GiB"},
}
"""What a profile must say, for a host of which only the way to it matters."""


@dataclass(frozen=True)
class Verdict(Generic[T, R]):
    """What became of the work on one item: a value, or the error that names its place."""

    item: T
    value: R | None = None
    error: IslandError | None = None


class Reach:
    """The hosts of a run by name. Safe from several threads; close it in the end.

    Args:
        plan: the run's; None: read when a host beyond this machine is asked for.
        run: its name.
        say: takes messages about connections.
        ask: puts a question to the person, about a host key that is new; None: nobody is there.
    """

    def __init__(self, plan: Plan | None, run: str, say: Say, ask: Ask | None = None) -> None:
        self._given = plan
        self._run = run
        self._say = say
        self._ask = ask
        self._controller = LocalHost()
        self._guard = threading.Lock()
        self._made: Fleet | None = None
        self._schedulers: dict[str, Scheduler] = {}

    def __enter__(self) -> Reach:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def host(self, site: str, host: str) -> Host:
        """The host ``host`` of ``site`` (empty: this machine), connected.

        Raises:
            UnreachableError, HostKeyError, PreflightError: as ``fleet.connect`` does.
        """
        if not host:
            return LocalHost(f"{site}/local")
        return self._fleet().host(self._plan.site(site), host)

    @cached_property
    def _plan(self) -> Plan:
        return self._given or load_plan_of(load(self._run))

    def beside(self, host: str) -> Host:
        """A host that belongs to no cell (the relay's); empty: the controller. A site that lists it lends its ssh."""
        if not host:
            return self._controller
        return self._fleet().host(self.profile_beside(host), host)

    def profile_beside(self, host: str) -> SiteProfile:
        """The profile under which ``host`` is reached: that of the site that lists it, or a bare one."""
        for site in self._plan.sites:
            if host in site.hosts:
                return site
        from islandctl.config.site import SiteProfile

        return SiteProfile.model_validate({**_BESIDE, "hosts": [host]})

    def at(self, site: str, host: str) -> Host:
        """``host`` of ``site``; without a site as :meth:`beside` gives it."""
        return self.host(site, host) if site else self.beside(host)

    def scheduler(self, site: str, host: str) -> Scheduler:
        """Who keeps the supervisors on ``host`` of ``site``; this machine and hosts of no site are plain ones."""
        if not (site and host):
            return PlainHosts()
        with self._guard:
            return self._schedulers.setdefault(site, scheduler_of(self._plan.site(site)))

    def seat(self, node: NodeRecord) -> Seat:
        """Where a node's supervisor is."""
        host = self.host(node.site, node.host)
        return Seat(host, node.python, node.code, node.supervisor, node.folder, node.num_ranks)

    def ssh(self, site: str, host: str) -> Ssh:
        """How ``host`` is reached: its site's way (empty: see ``profile_beside``)."""
        return (self._plan.site(site) if site else self.profile_beside(host)).ssh

    def close(self) -> None:
        """Give all connections back."""
        with self._guard:
            if self._made is not None:
                self._made.close()

    def _fleet(self) -> Fleet:
        """Made when first needed: a run on this machine alone never loads an SSH library."""
        from islandctl.fleet.connect import Fleet

        with self._guard:
            if self._made is None:
                self._made = Fleet(known_hosts=known_hosts(), on_message=self._say, ask=self._ask)
            return self._made


def told(place: str, error: IslandError | None) -> str:
    """An error's message, with the place in front where it does not name it itself."""
    message = error.message if error else "no answer"
    return message if message.startswith(place) else f"{place}: {message}"


def each(items: Sequence[T], work: Callable[[T], R]) -> list[Verdict[T, R]]:
    """Do ``work`` on every item side by side; one verdict an item, in the items' order.

    Only our own errors become verdicts: anything else is a fault and is raised.
    """

    def one(item: T) -> Verdict[T, R]:
        try:
            return Verdict(item, value=work(item))
        except IslandError as error:
            return Verdict(item, error=error)

    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(len(items), MAX_AT_WORK), thread_name_prefix="node") as pool:
        return list(pool.map(one, items))


def demand(verdicts: Sequence[Verdict[T, R]], what: str) -> list[R]:
    """The values of all items, or one error that names every item that failed.

    Raises:
        HostKeyError, UnreachableError, PreflightError: the gravest kind among the verdicts' errors.
    """
    errors = [verdict.error for verdict in verdicts if verdict.error is not None]
    if not errors:
        return [verdict.value for verdict in verdicts if verdict.error is None]  # type: ignore[misc]
    if len(errors) == 1:
        raise errors[0]
    kinds: tuple[type[IslandError], ...] = (HostKeyError, PreflightError, UnreachableError)
    first = next((error for kind in kinds for error in errors if isinstance(error, kind)), errors[0])
    text = "; ".join(error.message for error in errors)
    gravest = next((kind for kind in kinds if isinstance(first, kind)), IslandError)
    raise gravest(f"{what}: {len(errors)} of {len(verdicts)} nodes: {text}", hint=first.hint)
