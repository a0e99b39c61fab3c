"""The examination: nodes at rest, nodes under load, cells, links all at once, and in the end what follows together.

    connect → light checks → checks that load a node → cells → relay, links → sites, fleet

The nodes of a Slurm site come in with a job of their own (``visits.py``), submitted beside the light checks of all
others. Every check has its own deadline; a node that cannot be reached is one row, and holds nobody up.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from islandctl.config.exchange import Exchange
from islandctl.config.load import Loaded
from islandctl.config.paths import RunFolder, known_hosts
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import IslandError
from islandctl.fleet.checks.base import (
    Cell,
    CellCheck,
    Check,
    FleetCheck,
    LinkCheck,
    Node,
    NodeCheck,
    Tier,
    Verdict,
    Wanted,
)
from islandctl.fleet.checks.registry import all_checks
from islandctl.fleet.checks.runner import Done, Task, run, told_by
from islandctl.fleet.hostkeys import Ask
from islandctl.planner.catalogue import Accelerator, accelerator
from islandctl.planner.make import make_plan, saved_by
from islandctl.planner.plan import Plan
from islandctl.planner.speed import bus_bytes_per_s
from islandctl.runs import record as records
from islandctl.runs.doctor import relay
from islandctl.runs.doctor.report import DoctorReport, Row, in_order, row
from islandctl.runs.doctor.seen import compared
from islandctl.runs.doctor.visits import WAIT_S, SiteVisit, of_jobs, time_limit, wanted
from islandctl.runs.files import only_one
from islandctl.runs.reach import Reach, Say
from islandctl.runs.record import RunRecord
from islandctl.runs.secrets import know

RELAY_START_S, TUNNEL_S = 180.0, 2.0
"""A relay on a host that was never prepared gets its small environment first; and each node its tunnel."""
EVERYWHERE = "all sites"
AT_LOGIN = "a login node; --tier standard asks the site's nodes, in a job"
_KEEP_LEAST = ("gpu.bf16",)
"""Measured node by node; the site is as fast as its slowest."""


def examine(
    recipe: Loaded[Recipe],
    sites: Sequence[Loaded[SiteProfile]],
    checks: Sequence[Check],
    *,
    tier: Tier,
    say: Say,
    ask: Ask | None = None,
    seconds: float | None = None,
    wait_s: float | None = None,
) -> DoctorReport:
    """Ask all ``checks`` of all sites.

    Args:
        say: takes progress, one line each.
        ask: puts a question to the person; None: nobody is there.
        seconds: for how long each rate is measured; None: as the tier says.
        wait_s: how long a Slurm site's job may wait for its nodes; None: as the tier says.

    Raises:
        ConfigError: recipe and sites contradict one another.
    """
    plan, began = make_plan(for_one(recipe, sites), sites), time.monotonic()
    know(plan)
    record = records.create(plan, f"doctor-{secrets.token_hex(4)}", launcher_pid=os.getpid())
    folder = RunFolder.of(record.run)
    with only_one(folder.root / "lock", "islandctl doctor"), Reach(plan, record.run, say, ask) as reach:
        known = {site.value.name: accelerator(site) for site in sites}
        here = _Examination(plan, known, record, reach, say, WAIT_S[tier] if wait_s is None else wait_s)
        try:
            for site in sites:
                here.nodes += _nodes(plan, recipe, site, reach, tier, seconds, record.mark)
            here.ask(checks, tier, seconds)
        finally:
            here.close()
            for line in relay.end(record, plan, reach, lambda line: None):
                say(line)
    return DoctorReport(
        tier=tier,
        sites=tuple(site.name for site in plan.sites),
        rows=in_order(here.rows, [site.name for site in plan.sites]),
        measured=here.measured,
        seconds=round(time.monotonic() - began, 1),
    )


def for_one(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]]) -> Loaded[Recipe]:
    """The recipe; where only one site of several is to be examined, one that trains there without an exchange."""
    exchange = recipe.value.exchange
    if len(sites) != 1 or exchange.cells is not None or exchange.mode == "none":
        return recipe
    alone = recipe.value.model_copy(update={"exchange": Exchange(mode="none")})
    return replace(recipe, value=alone)


def _nodes(
    plan: Plan,
    recipe: Loaded[Recipe],
    site: Loaded[SiteProfile],
    reach: Reach,
    tier: Tier,
    seconds: float | None,
    mark: str,
) -> list[Node]:
    """The site's nodes, each host once, whatever cells it belongs to."""
    profile = site.value
    cells = [cell for cell in plan.cells if cell.site == profile.name]
    # of the recipe as it is: a site that is examined alone will hold the exchange's state all the same
    most_ranks = max(cell.num_ranks for cell in cells)
    wanted = Wanted(
        checkpoint_bytes=saved_by(recipe, most_ranks),
        cells=len(cells),
        precision=plan.recipe.training.precision,
        matrix_flops=accelerator(site).matrix_flops,
        relay_address=plan.recipe.relay.address,
        seconds=seconds,
    )
    ranks: dict[str, int] = {}
    for cell in cells:
        for node in cell.nodes:
            ranks[node.host] = ranks.get(node.host, 0) + node.num_ranks
    return [
        Node(
            site=profile,
            name=host,
            ranks=num_ranks,
            open=partial(reach.host, profile.name, host),
            tier=tier,
            wanted=wanted,
            known_hosts=known_hosts(),
            facts={"mark": mark},
            kind="host" if profile.hosts_are_nodes else "login",
        )
        for host, num_ranks in ranks.items()
    ]


class _Examination:
    """What is known so far."""

    def __init__(
        self, plan: Plan, known: dict[str, Accelerator], record: RunRecord, reach: Reach, say: Say, wait_s: float
    ) -> None:
        self._plan, self._known, self._record, self._reach, self._say = plan, known, record, reach, say
        self._wait_s = wait_s
        self._visits: list[SiteVisit] = []
        self.nodes: list[Node] = []
        self.rows: list[Row] = []
        self.measured: dict[str, dict[str, float]] = {}

    def ask(self, checks: Sequence[Check], tier: Tier, seconds: float | None) -> None:
        """All of them, in the order of the module's head."""
        self._say(f"connecting to {_counted(len(self.nodes), 'node')} of {_counted(len(self._plan.sites), 'site')}")
        present = self._connect(checks, self.nodes)
        of_nodes = [check for check in checks if isinstance(check, NodeCheck) and check.name != "login"]
        light = [check for check in of_nodes if not check.measures]
        heavy = [check for check in of_nodes if check.measures]
        if wanted(checks, tier):
            limit_s = time_limit(checks, tier, seconds)
            self._begin_visits([node for node in present if node.kind == "login"], limit_s)
        else:
            self._only_in_jobs(of_nodes)
        self._run([*self._of_nodes(light, present), *self._of_visits(checks)])
        present = self._with_visited(checks, light, present)
        names = [check.name for check in heavy if check.tier != "quick"]
        if names and present:
            self._say(f"measuring on {_counted(len(present), 'node')}: {', '.join(names)}")
        self._known_again([check for check in light if check.name == "gpus"])
        for loading in heavy:  # one after another: all nodes write at the same time, as they do at a checkpoint
            self._run(self._of_nodes([loading], present))
        for check in checks:
            if isinstance(check, CellCheck):
                self._run(self._of_cells(check, present))
        links = [check for check in checks if isinstance(check, LinkCheck)]
        if links and present:
            self._links(links, present)
        self._absent(links, present)
        for check in checks:
            if isinstance(check, FleetCheck):
                self._run(self._of_groups(check))

    def close(self) -> None:
        """Let nothing be submitted any more, whatever is still under way."""
        for visit in self._visits:
            visit.close()

    def _connect(self, checks: Sequence[Check], nodes: Sequence[Node]) -> list[Node]:
        """The nodes that answer. One that does not is a row, whether or not its login was asked about."""
        check = next(check for check in all_checks() if check.name == "login")
        asked = any(check.name == "login" for check in checks)
        absent: set[str] = set()
        for done in run(list(self._of_nodes([check], nodes))):
            if done.verdicts[0].level in ("fail", "unknown"):
                absent.add(done.task.place)
            elif not asked:
                continue
            self._take(done)
        for one in checks:
            if isinstance(one, NodeCheck) and one.name != "login":
                for node in nodes:
                    if node.label in absent and node.kind in one.asks:
                        self._skip(one, "no connection", node.site.name, node.label)
        return [node for node in nodes if node.label not in absent]

    def _begin_visits(self, logins: Sequence[Node], limit_s: float) -> None:
        """A job for each of these sites; on record before it is submitted, so that it is ended whatever happens."""
        self._visits = [
            SiteVisit(login, self._record.mark, wait_s=self._wait_s, limit_s=limit_s, say=self._say)
            for login in logins
        ]
        self._record = records.change(self._record, visits=[visit.record for visit in self._visits])

    def _of_visits(self, checks: Sequence[Check]) -> Iterator[Task]:
        check = next(check for check in all_checks() if check.name == "slurm")
        for visit in self._visits:
            yield Task(check, visit.login.label, visit.go, visit.deadline_s)

    def _with_visited(self, checks: Sequence[Check], light: Sequence[NodeCheck], present: list[Node]) -> list[Node]:
        """Those that are to be measured: of a site with a job the job's nodes, in place of the login node. What loads
        nothing has been asked of all of them."""
        came = [node for visit in self._visits for node in visit.nodes]
        arrived = self._connect(checks, came) if came else []
        self._run(self._of_nodes(light, arrived))
        visited = {visit.site.name: visit for visit in self._visits}
        self.nodes = [node for node in self.nodes if node.site.name not in visited] + came
        for visit in self._visits:
            for check in checks if not visit.nodes else ():
                if isinstance(check, LinkCheck) or of_jobs(check):
                    self._skip(check, visit.why, visit.site.name, f"{visit.site.name}/nodes")
        return [node for node in present if node.site.name not in visited] + arrived

    def _only_in_jobs(self, checks: Sequence[NodeCheck]) -> None:
        """What is not asked of login nodes."""
        for node in self.nodes:
            for check in checks if node.kind == "login" else ():
                if "login" not in check.asks and "job" in check.asks:
                    self._skip(check, AT_LOGIN, node.site.name, node.label)

    def _skip(self, check: Check, why: str, site: str, place: str) -> None:
        self.rows.append(row(check, Verdict("skipped", why), site=site, place=place, seconds=0.0))

    def _absent(self, checks: Sequence[LinkCheck], present: Sequence[Node]) -> None:
        """Links of sites of which no node answers, and that is why nobody could ask about them."""
        there = {node.site.name for node in present}
        told = {visit.site.name for visit in self._visits if not visit.nodes}
        for site in self._plan.sites:
            for check in checks if site.name not in there | told else ():
                self._skip(check, "no connection", site.name, site.name)

    def _known_again(self, checks: Sequence[NodeCheck]) -> None:
        """Are the accelerators those of the last time?"""
        told = compared({node.label: node.facts.get("uuids", ()) for node in self.nodes}) if checks else {}
        for place, verdict in told.items():
            self.rows.append(row(checks[0], verdict, site=self._site_of(place), place=place, seconds=0.0))

    def _links(self, checks: Sequence[LinkCheck], present: Sequence[Node]) -> None:
        """Start the relay, as a task with a deadline, and ask about all links at the same time."""
        place, first = f"relay on {self._plan.recipe.relay.host}", checks[0]
        self._say(f"starting a relay on {self._plan.recipe.relay.host}, to measure the way to it")
        started: list[RunRecord] = []
        shut: dict[str, IslandError] = {}

        def start() -> Verdict:
            record, without = relay.begin(self._record, self._plan, self._reach, present, self._say)
            shut.update(without)
            started.append(record)
            return Verdict("ok", "started")

        for done in run([Task(first, place, start, RELAY_START_S + TUNNEL_S * len(present))]):
            if done.verdicts[0].level != "ok":
                self.rows += [row(first, one, site="", place=place, seconds=done.seconds) for one in done.verdicts]
        if not started:
            return
        login = {one.site.name: one.visit.login for one in self._visits if one.visit is not None}
        links = relay.links(started[0], self._plan, present, login)
        for check in checks:
            for label, error in shut.items():
                one = told_by(error, label)
                self.rows.append(row(check, one, site=self._site_of(label), place=label, seconds=0.0))
            if check.measures:
                self._say(f"measuring all links at once: {check.name}")
            limit = check.deadline(present[0].tier, present[0].wanted.seconds)
            self._run(Task(check, link.site.name, partial(check.look, link), limit) for link in links)

    def _of_nodes(self, checks: Sequence[Check], nodes: Sequence[Node]) -> Iterator[Task]:
        for check in checks:
            assert isinstance(check, NodeCheck)
            for node in (node for node in nodes if node.kind in check.asks):
                limit = check.deadline(node.tier, node.wanted.seconds)
                yield Task(check, node.label, partial(check.look, node), limit, key=node.label)

    def _of_cells(self, check: CellCheck, present: Sequence[Node]) -> Iterator[Task]:
        known = {(node.site.name, node.name): node for node in present if node.kind == "host"}
        visits = {visit.site.name: visit.nodes for visit in self._visits}
        first: Counter[str] = Counter()  # rank of the site with which the cell begins
        for cell in self._plan.cells:
            at = first[cell.site] // self._plan.site(cell.site).ranks_per_node
            first[cell.site] += cell.num_ranks
            if cell.site in visits:
                of_job = [one if one in present else None for one in visits[cell.site]]
                members = of_job[at : at + len(cell.nodes)]
            else:
                members = [known.get((cell.site, node.host)) for node in cell.nodes]
            nodes = list({node.label: node for node in members if node is not None}.values())
            place = f"cell {cell.name}"
            if None in members and len(members) > 1:
                login = not self._plan.site(cell.site).hosts_are_nodes and cell.site not in visits
                self._skip(check, AT_LOGIN if login else "not all of its nodes answer", cell.site, place)
            elif len(nodes) > 1:
                whole = Cell(cell.name, tuple(nodes), self._bus(nodes))
                yield Task(check, place, partial(check.look, whole), check.deadline(nodes[0].tier))

    def _bus(self, nodes: Sequence[Node]) -> float | None:
        site = nodes[0].site
        return bus_bytes_per_s(site, self._known[site.name], min(node.ranks for node in nodes))

    def _of_groups(self, check: FleetCheck) -> Iterator[Task]:
        if check.scope == "fleet":
            yield Task(check, EVERYWHERE, partial(check.look, self.nodes), check.deadline_s)
            return
        for site in self._plan.sites:
            members = [node for node in self.nodes if node.site.name == site.name]
            if members:
                yield Task(check, site.name, partial(check.look, members), check.deadline_s)
            else:
                self._skip(check, "none of its nodes was asked", site.name, site.name)

    def _run(self, tasks: Iterable[Task]) -> None:
        for done in run(list(tasks)):
            self._take(done)

    def _take(self, done: Done) -> None:
        place = done.task.place
        site = self._site_of(place)
        for verdict in done.verdicts:
            self.rows.append(row(done.task.check, verdict, site=site, place=place, seconds=done.seconds))
            for key, value in verdict.measured.items():
                known = self.measured.setdefault(site, {})
                known[key] = min(known.get(key, value), value) if key in _KEEP_LEAST else value

    def _site_of(self, place: str) -> str:
        cells: dict[str, str] = {f"cell {cell.name}": cell.site for cell in self._plan.cells}
        name = cells.get(place) or place.partition("/")[0]
        return name if any(site.name == name for site in self._plan.sites) else ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
