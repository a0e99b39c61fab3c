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
    fail,
    listed,
    ok,
    skipped,
)
from islandctl.fleet.host import Host
from islandctl.fleet.slurm import SlurmJobs
from islandctl.fleet.slurm_text import longest
from islandctl.fleet.slurm_visit import BEGIN_S, NAME, Visit
from islandctl.runs.reach import Say
from islandctl.runs.record import VisitRecord

WAIT_S: dict[Tier, float] = {"quick": 300.0, "standard": 300.0, "deep": 3600.0}
"""So long a job may wait for its nodes, where nobody says otherwise."""
LIGHT_S, RELAY_S = 240.0, 180.0
"""Of the job: for the checks that load nothing; for a relay to start."""
QUEUE_S = 3.0
"""Between two questions about a job that waits, in the end."""
ROUND_S = 180.0
"""Over waiting: for submitting and cancelling."""
SOON_S = 2.0
"""A job that begins so soon waits for nothing."""
AGAIN_S = 60.0
"""Between two words about a job that waits for the same reason."""


def wanted(checks: Sequence[Check], tier: Tier) -> bool:
    """Must nodes be asked that only a job leads to? The quick tier stays on the login node."""
    asked = [one for one in checks if isinstance(one, CellCheck | LinkCheck) or of_jobs(one) or one.name == "login"]
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
            place, _, what = error.message.partition(": ")
            if place != self.login.label and place.startswith(f"{self.site.name}/"):  # the fault of a node
                return fail(what, hint=error.hint, place=place)
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
        known = scheduler.nodes(host)
        there, fit = ({node.name for node in known if node.fit or every} for every in (True, False))
        if known and len(fit) < self.site.num_nodes:
            return skipped(f"no job: {len(fit)} of {len(there)} nodes can be used, {self.site.num_nodes} are needed")
        limits = (self._limit_s, self.site.slurm.time if self.site.slurm else None, longest(known))
        limit_s = min(limit for limit in limits if limit is not None)
        visit = self.visit = Visit(self.site, host, scheduler, self._mark, self.record.folder)
        visit.begin(limit_s=limit_s, wait_s=self._wait_s)
        number = self.site.num_nodes
        asks = f"{number} node{'s' if number > 1 else ''} for at most {_rough(limit_s)}"
        self._say(f"{self.site.name}: Slurm has the doctor's job {visit.job}: {asks}")
        began = time.monotonic()
        if why := self._wait(visit, began):
            visit.end()
            self._say(f"{self.site.name}: job {visit.job} is out of the queue again")
            return skipped(f"no nodes within {_rough(self._wait_s)} (--wait gives the job more): {why}")
        hosts = visit.hosts()
        self.nodes = tuple(self._node(host_of_job, host_of_job.name, visit.job) for host_of_job in hosts)
        names = listed([node.name for node in self.nodes], 8)
        told = f"job {visit.job} has {names} after {seconds_text(round(time.monotonic() - began, 1))}"
        self._say(f"{self.site.name}: {told}")
        return ok(told)

    def _wait(self, visit: Visit, began: float) -> str:
        """Wait for nodes, and say now and then for what. Gives what it still waits for when the time is up."""
        told, told_at, pause = "", began, 0.5
        while why := visit.pending():
            now = time.monotonic()
            left = self._wait_s - (now - began)
            if left <= 0:
                return why
            reason = why.partition(";")[0]
            if now - began > SOON_S and (reason != told or now - told_at > AGAIN_S):
                self._say(f"{self.site.name}: {why}; it is waited for {_rough(left)} more")
                told, told_at = reason, now
            time.sleep(min(pause, left))
            pause = min(QUEUE_S, 1.5 * pause)
        return ""

    def _node(self, host: Host, name: str, job: str) -> Node:
        facts = {"mark": self._mark}
        open_it = partial(_same, host)
        ranks = self.site.ranks_per_node
        return replace(self.login, name=name, ranks=ranks, open=open_it, facts=facts, kind="job", job=job)


def _rough(seconds: float) -> str:
    """``4 min``, ``50 s``."""
    return f"{round(seconds / 60)} min" if seconds >= 90 else seconds_text(max(1.0, round(seconds)))


def _same(host: Host) -> Host:
    return host
