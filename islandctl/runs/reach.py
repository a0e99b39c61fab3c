"""The hosts of one run: connected once, when first needed, and used side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from islandctl.config.paths import RunFolder
from islandctl.config.site import SiteProfile
from islandctl.errors import HostKeyError, IslandError, PreflightError, UnreachableError
from islandctl.fleet.connect import connect, this_machine
from islandctl.fleet.host import Host
from islandctl.planner.plan import Plan

T = TypeVar("T")
R = TypeVar("R")
Say = Callable[[str], None]
"""Takes one line for the person who waits."""

MAX_HANDSHAKES = 8
"""Logins at once: sshd starts to refuse at ten (MaxStartups 10:30:100)."""
MAX_AT_WORK = 64


@dataclass(frozen=True)
class Verdict(Generic[T, R]):
    """What became of the work on one item: a value, or the error that names its place."""

    item: T
    value: R | None = None
    error: IslandError | None = None


class Reach:
    """Connections to the hosts of a run. Safe from several threads; close it in the end."""

    def __init__(self, plan: Plan, run: str, say: Say) -> None:
        self._sites = {site.name: site for site in plan.sites}
        self._known_hosts: Path = RunFolder.of(run).known_hosts
        self._say = say
        self._hosts: dict[tuple[str, str], Host] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._guard = threading.Lock()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)

    def __enter__(self) -> Reach:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def site(self, name: str) -> SiteProfile:
        """The profile called ``name``."""
        return self._sites[name]

    def host(self, site: str, host: str) -> Host:
        """The host ``host`` of ``site`` (empty: this machine), connected.

        Raises:
            UnreachableError, HostKeyError, PreflightError: as ``fleet.connect`` does.
        """
        key = (site, host)
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._hosts:
                with self._handshakes:
                    self._hosts[key] = connect(
                        self._sites[site], host, known_hosts=self._known_hosts, on_message=self._say
                    )
            return self._hosts[key]

    def controller(self) -> Host:
        """This machine."""
        key = ("", "")
        with self._guard:
            if key not in self._hosts:
                self._hosts[key] = this_machine()
            return self._hosts[key]

    def forget(self, site: str, host: str) -> None:
        """Drop a connection that was lost; the next use makes a new one."""
        with self._guard:
            gone = self._hosts.pop((site, host), None)
        if gone is not None:
            gone.close()

    def close(self) -> None:
        """Give all connections back."""
        with self._guard:
            hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            host.close()


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
