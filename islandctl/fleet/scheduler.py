"""How the supervisors of a cell are started, looked at and ended: one small protocol, and its form on plain hosts.

The other form is a job of Slurm (``slurm.py``). Everything else on a node is the same for both: the files, and the
supervisor itself, which keeps the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from islandctl.config.site import SiteProfile
from islandctl.errors import PreflightError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorJob, SupervisorState

_ADDRESS = """
import os, socket
def main(args, payload):
    # no packet is sent: connecting a datagram socket only asks the routing table which address would be used
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((target, 9))
                return sock.getsockname()[0]
            except OSError:
                continue
    # a cluster without a way out: where SSH came in
    return next((one for one in os.environ.get("SSH_CONNECTION", "").split()[2:3] if "%" not in one), None)
"""


@dataclass(frozen=True)
class Seat:
    """Where the supervisor of one node of a cell is, or will be."""

    host: Host
    """Through which it is reached: the node, or the login node of its cluster."""
    python: str
    code: str
    supervisor: str
    folder: str
    """The supervisor's; the cell's lies around it."""
    num_ranks: int
    """Of the cell, on this node."""


class Scheduler(Protocol):
    """Of one site. Calls are safe from several threads.

    The seats of a call are one node of a cell, or all of them where ``as_one``.

    Raises everywhere: ``UnreachableError`` (nobody answers: nothing is known), ``PreflightError``.
    """

    as_one: bool
    """Are a cell's nodes handled together? Their files are then seen from one host, and they live and end as one."""

    def present(self, host: Host) -> str:
        """See that it is there at all, before anything is prepared. Gives its version; empty: plain hosts.

        Args:
            host: of the site.

        Raises:
            PreflightError: its commands are not there.
        """

    def address(self, seat: Seat) -> str:
        """A node's address, by which its peers reach it; empty: the nodes find that out when they run."""

    def start(self, seats: Sequence[Seat], jobs: Sequence[SupervisorJob]) -> str:
        """Have supervisors begin. Returns once it is sure that they have begun, or that they will.

        Returns:
            What deserves a word; empty: they have begun.

        Raises:
            RunError: one runs there already, or it did not come up.
        """

    def states(self, seats: Sequence[Seat]) -> list[SupervisorState]:
        """What the supervisors do."""

    def stop(self, seats: Sequence[Seat], timeout_s: float) -> None:
        """Have the supervisors end their workers, and wait until that is so.

        Args:
            timeout_s: what the workers get to save and end.

        Raises:
            UnreachableError: they had not ended in time; they are told to, and stay so.
        """

    def left(self, host: Host, mark: str, *, end: bool) -> list[str]:
        """What is left of a run beyond processes of the host itself, one line each.

        Args:
            host: of the site.
            end: end what is found, and look again.
        """


class PlainHosts:
    """Machines that are reached themselves: supervisors are begun over the link, and outlive it."""

    as_one = False

    def present(self, host: Host) -> str:
        """Nothing is needed but the host."""
        return ""

    def address(self, seat: Seat) -> str:
        """The host's own: a name would be looked up by each of its peers. See ``Scheduler``."""
        host = seat.host
        address = host.python(_ADDRESS, {}, timeout_s=30.0)
        if not address:
            raise PreflightError(
                f"{host.label}: the node has no address that its peers could reach",
                hint="check its network interfaces",
            )
        return str(address)

    def start(self, seats: Sequence[Seat], jobs: Sequence[SupervisorJob]) -> str:
        """See ``Scheduler``."""
        for seat, job in zip(seats, jobs, strict=True):
            nodes.start(seat.host, seat.supervisor, seat.python, seat.folder, job)
        return ""

    def states(self, seats: Sequence[Seat]) -> list[SupervisorState]:
        """See ``Scheduler``."""
        return [nodes.state(seat.host, seat.folder) for seat in seats]

    def stop(self, seats: Sequence[Seat], timeout_s: float) -> None:
        """See ``Scheduler``."""
        for seat in seats:
            nodes.stop(seat.host, seat.folder, timeout_s)

    def left(self, host: Host, mark: str, *, end: bool) -> list[str]:
        """Nothing: there is no beyond."""
        return []


def scheduler_of(site: SiteProfile) -> Scheduler:
    """The scheduler of a site, as its profile names it."""
    if site.scheduler == "slurm":
        from islandctl.fleet.slurm import SlurmJobs

        return SlurmJobs(site)
    return PlainHosts()
