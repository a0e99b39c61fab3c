"""The nodes of Slurm sites: one short job a site, and while it lasts its nodes can be asked like all others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from islandctl.config.units import seconds_text
from islandctl.errors import IslandError
from islandctl.fleet.checks.base import (
    CellCheck,
    Check,
    LinkCheck,
    Node,
    NodeCheck,
    Tier,
    Verdict,
    listed,
    ok,
    skipped,
)
from islandctl.fleet.host import Host
from islandctl.fleet.slurm import SlurmJobs
from islandctl.fleet.slurm_text import longest
from islandctl.fleet.slurm_visit import BEGIN_S, NAME, QUEUE_S, Visit
from islandctl.runs.reach import Say
from islandctl.runs.record import VisitRecord

WAIT_S: dict[Tier, float] = {"quick": 300.0, "standard": 300.0, "deep": 3600.0}
"""So long a job may wait for its nodes, where nobody says otherwise."""
LIGHT_S, RELAY_S = 240.0, 180.0
"""Of the job: for the checks that load nothing; for a relay to start."""
ROUND_S = 180.0
"""Over waiting: for submitting and cancelling."""
AGAIN_S = 60.0
"""Between two words about a job that waits for the same reason."""


def wanted(checks: Sequence[Check], tier: Tier) -> bool:
    """Must nodes be asked that only a job leads to? The quick tier stays on the login node."""
    asked = [check for check in checks if isinstance(check, CellCheck | LinkCheck) or of_jobs(check)]
    return any((tier, check.tier) != ("quick", "quick") for check in asked)


def time_limit(checks: Sequence[Check], tier: Tier, seconds: float | None) -> float:
    """What the job may take: all that loads a node has its whole deadline, one after another.

    Args:
        seconds: for how long each rate is measured; None: as the tier says.
    """
    loads = [one for one in checks if isinstance(one, CellCheck | LinkCheck) or (of_jobs(one) and one.measures)]
    relay = RELAY_S if any(isinstance(one, LinkCheck) for one in loads) else 0.0
    return LIGHT_S + relay + sum(one.deadline(tier, seconds) for one in loads)


def of_jobs(check: Check) -> bool:
    """Is it asked of nodes that only a job leads to?"""
    return isinstance(check, NodeCheck) and "job" in check.asks and check.name != "login"


class SiteVisit:
    """One site's job, and what became of it.

    Args:
        login: the site's login node, connected.
        mark: of the examination.
        wait_s: how long the job may wait for its nodes.
        limit_s: its time limit; the profile's and the partition's count where they are shorter.
    """

    def __init__(self, login: Node, mark: str, *, wait_s: float, limit_s: float, say: Say) -> None:
        site = login.site
        folder = str(PurePosixPath(site.work_dir) / "runs" / mark / NAME)
        self.login, self.site = login, site
        self.record = VisitRecord(site=site.name, host=login.name, work_dir=site.work_dir, folder=folder)
        self.nodes: tuple[Node, ...] = ()
        """In the order of the plan's; empty: the job has not begun."""
        self.why = "its job did not begin"
        """Why there are none."""
        self.visit: Visit | None = None
        self._mark, self._wait_s, self._limit_s, self._say = mark, wait_s, limit_s, say

    @property
    def deadline_s(self) -> float:
        """For ``go``."""
        return self._wait_s + BEGIN_S + ROUND_S

    def go(self) -> Verdict:
        """Submit the job and wait for its nodes. Says how that went."""
        try:
            verdict = self._go()
        except IslandError as error:
            self.why = f"no job on its nodes: {error.message.removeprefix(f'{self.login.label}: ')}"
            raise
        self.why = verdict.text
        return verdict

    def close(self) -> None:
        """Have it submit nothing and ask nothing any more; what it has submitted is still to be cancelled."""
        if self.visit is not None:
            self.visit.close()

    def _go(self) -> Verdict:
        scheduler, host = SlurmJobs(self.site), self.login.open()
        scheduler.present(host)
        limits = (self._limit_s, self.site.slurm.time if self.site.slurm else None, longest(scheduler.nodes(host)))
        limit_s = min(limit for limit in limits if limit is not None)
        visit = self.visit = Visit(self.site, host, scheduler, self._mark, self.record.folder)
        visit.begin(limit_s=limit_s, wait_s=self._wait_s)
        number = self.site.num_nodes
        asks = f"{number} node{'s' if number > 1 else ''} for at most {seconds_text(limit_s)}"
        self._say(f"{self.site.name}: Slurm has the doctor's job {visit.job}: {asks}")
        began = time.monotonic()
        if why := self._wait(visit, began):
            visit.end()
            self._say(f"{self.site.name}: job {visit.job} is out of the queue again")
            return skipped(f"no nodes within {seconds_text(self._wait_s)} (--wait gives the job more): {why}")
        hosts = visit.hosts()
        self.nodes = tuple(self._node(host_of_job, host_of_job.name, visit.job) for host_of_job in hosts)
        names = listed([node.name for node in self.nodes], 8)
        told = f"job {visit.job} has {names} after {seconds_text(round(time.monotonic() - began, 1))}"
        self._say(f"{self.site.name}: {told}")
        return ok(told)

    def _wait(self, visit: Visit, began: float) -> str:
        """Wait for nodes, and say now and then for what. Gives what it still waits for when the time is up."""
        told, told_at = "", began
        while why := visit.pending():
            now = time.monotonic()
            left = self._wait_s - (now - began)
            if left <= 0:
                return why
            if why.partition(";")[0] != told or now - told_at > AGAIN_S:
                self._say(f"{self.site.name}: {why}; it gets {seconds_text(max(1.0, round(left)))} more")
                told, told_at = why.partition(";")[0], now
            time.sleep(min(QUEUE_S, left))
        return ""

    def _node(self, host: Host, name: str, job: str) -> Node:
        facts = {"mark": self._mark}
        open_it = partial(_same, host)
        ranks = self.site.ranks_per_node
        return replace(self.login, name=name, ranks=ranks, open=open_it, facts=facts, kind="job", job=job)


def _same(host: Host) -> Host:
    return host
