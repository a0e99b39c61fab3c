"""From a profile's host to a live connection; many at once with a verdict for each."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from islandctl.config.site import SiteProfile
from islandctl.errors import IslandError
from islandctl.fleet.host import Host
from islandctl.fleet.hostkeys import Ask, HostKeys
from islandctl.fleet.local import LocalHost
from islandctl.fleet.openssh import resolve
from islandctl.fleet.ssh_host import Bastions, SshHost

PARALLEL = 32
"""Connections being opened at a time; each server sees at most eight of them (ssh.py)."""


def connect(
    site: SiteProfile,
    host: str,
    *,
    known_hosts: Path,
    on_message: Callable[[str], None],
    bastions: Bastions | None = None,
    ask: Ask | None = None,
) -> Host:
    """A live connection to one host of a site; ``host`` is as written in the profile (local sites: anything).

    Args:
        known_hosts: islandctl's own file; read, and added to when a new key is accepted.
        on_message: called with a line for the person, for example a new host key's fingerprint.
        bastions: connections to jump hosts to share between hosts.
        ask: puts a question to the person, for the policy ``ask``; None: there is nobody to ask.

    Raises:
        ConfigError: the ssh configuration cannot be followed.
        HostKeyError: unknown or changed host key; the hint is the command that accepts it.
        PreflightError: login refused.
        UnreachableError: name, route, port, timeout, login limit.
    """
    if site.scheduler == "local":
        return LocalHost(f"{site.name}/local")
    python = site.environment.python
    ssh_host = SshHost(
        f"{site.name}/{host}",
        resolve(host, site.ssh),
        HostKeys(known_hosts, site.ssh.host_keys, on_message, ask),
        bastions=bastions,
        # A bare name may need the profile's setup lines; a path is good from the first command on.
        python=python if "/" in python else "python3",
    )
    try:
        ssh_host.connect()
    except BaseException:
        ssh_host.close()
        raise
    return ssh_host


def this_machine() -> Host:
    """The controller itself: for the relay and the tunnels."""
    return LocalHost()


@dataclass(frozen=True)
class Verdict:
    """How connecting to one host went: a host or an error."""

    site: SiteProfile
    name: str
    """The host as written in the profile; empty for this machine."""
    host: Host | None
    error: IslandError | None


class Fleet:
    """Connections to many hosts, opened in parallel, closed together.

    with Fleet(known_hosts=folder.known_hosts, on_message=say) as fleet:
        for verdict in fleet.open((site, host) for site in sites for host in site.hosts): …
        fleet.host(site, name).run(…)
    """

    def __init__(self, *, known_hosts: Path, on_message: Callable[[str], None], ask: Ask | None = None) -> None:
        self._known_hosts = known_hosts
        self._on_message = on_message
        self._ask = ask
        self._bastions = Bastions()
        self._hosts: dict[tuple[str, str], Host] = {}
        self._locks: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, wanted: Iterable[tuple[SiteProfile, str]]) -> list[Verdict]:
        """Connect to all of them; one verdict each, in order. Errors are reported, not raised."""
        pairs = list(wanted)
        with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
            return list(pool.map(lambda pair: self._verdict(*pair), pairs))

    def _verdict(self, site: SiteProfile, name: str) -> Verdict:
        try:
            return Verdict(site, name, self.host(site, name), None)
        except IslandError as error:
            return Verdict(site, name, None, error)

    def host(self, site: SiteProfile, name: str) -> Host:
        """The connection to one host; opened when there is none. Raises what ``connect`` raises."""
        key = (site.name, name)
        with self._locks[key]:
            if key not in self._hosts:
                self._hosts[key] = connect(
                    site,
                    name,
                    known_hosts=self._known_hosts,
                    on_message=self._on_message,
                    bastions=self._bastions,
                    ask=self._ask,
                )
            return self._hosts[key]

    def close(self) -> None:
        """Give all connections back, hosts before their jump hosts."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
        self._bastions.close()
