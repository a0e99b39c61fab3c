"""Launch: from a plan to running workers, step by step, each with a verdict a node.

    connect → prepare → text → relay → tunnels → cell files → supervisors

Until the supervisors run, any failure ends the launch: what was started is ended again, that is proved, and the
record says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath

from islandctl.config.pace import Pace
from islandctl.config.paths import CellFolder, RunFolder
from islandctl.config.secrets import hide
from islandctl.errors import InfeasibleError, IslandError
from islandctl.fleet.bundle import make_bundle
from islandctl.fleet.delivery import Progress
from islandctl.fleet.hostkeys import Ask
from islandctl.fleet.needs import worker_needs
from islandctl.fleet.provision import Place, prepare_all
from islandctl.planner.limits import not_yet
from islandctl.planner.plan import Plan
from islandctl.runs import record as records
from islandctl.runs import secrets
from islandctl.runs.files import only_one
from islandctl.runs.folders import check_folders
from islandctl.runs.given import demand_all
from islandctl.runs.network import await_tunnels, start_relay, start_tunnels
from islandctl.runs.reach import Reach, Say, Verdict, demand, each
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.relay import make_secrets
from islandctl.runs.stop import end_everything
from islandctl.runs.text import check_text
from islandctl.runs.workers import script_bundle, start_workers, write_cells

FEW = 8
"""Nodes that are told of one by one."""


def check_plan(plan: Plan) -> list[str]:
    """Refuse what cannot work; gives what deserves a word.

    Raises:
        InfeasibleError: the plan is infeasible, or holds what ``launch`` cannot run.
    """
    binding = [finding for finding in plan.findings if finding.level == "fail"] or not_yet(plan)
    if binding or not plan.feasible:
        text = "; ".join(f"{finding.place}: {finding.text}" for finding in binding) or "it is not feasible"
        raise InfeasibleError(
            f"the plan cannot work: {text}", hint=binding[0].hint if binding else "islandctl plan shows why"
        )
    return [f"{finding.place}: {finding.text}" for finding in plan.findings if finding.level == "warn"]


def start(
    plan: Plan,
    run: str | None,
    say: Say,
    ask: Ask | None = None,
    progress: Progress = lambda name, done, total: None,
) -> RunRecord:
    """Bring a plan to running workers.

    Args:
        run: the run's name; None makes one of recipe, date and a counter.
        say: takes progress, one line each.
        ask: puts a question to the person; None: nobody is there.
        progress: told of large transfers: a name, bytes sent, bytes to send.

    Raises:
        UsageError: the name is taken.
        ConfigError: a secret is not set here, or a file that a profile names cannot be read.
        HostKeyError, PreflightError, UnreachableError, RunError: a step failed; everything it had started is ended.
    """
    secrets.know(plan)
    demand_all(plan)
    record = records.create(plan, run, launcher_pid=os.getpid())
    with (
        only_one(RunFolder.of(record.run).root / "lock", f"islandctl launch {record.run}"),
        Reach(plan, record.run, say, ask) as reach,
        _or_undo(record, plan, reach, say),
    ):
        say(f"{record.run}: connecting to {_places(plan)}")
        record = _prepare(record, plan, reach, say, progress)
        make_secrets(record, plan)
        record = start_relay(record, plan, reach, say)
        record = start_tunnels(record, plan, reach, say)
        await_tunnels(record, reach)
        write_cells(record, plan, reach)
        start_workers(record, plan, reach, say)
        return records.change(record, phase="launched", reason="", launcher_pid=0)


def _prepare(record: RunRecord, plan: Plan, reach: Reach, say: Say, progress: Progress) -> RunRecord:
    """Connect to every host, put code and environment there, and see that the text is there; each host once."""
    places = list(dict.fromkeys((cell.site, node.host) for cell in plan.cells for node in cell.nodes))
    optimizer = plan.recipe.training.optimizer
    script = script_bundle(plan)
    began = time.monotonic()
    queued = [place for place in places if plan.site(place[0]).scheduler == "slurm"]
    demand(each(queued, lambda one: reach.scheduler(*one).present(reach.host(*one))), "asking for Slurm")
    verdicts = prepare_all(
        [Place(plan.site(site), partial(reach.host, site, host)) for site, host in places],
        [make_bundle(), *([script] if script else [])],
        say,
        needs=worker_needs(optimizer.kind if optimizer else ""),
        progress=progress,
    )
    told = [
        Verdict(place, error=done) if isinstance(done, IslandError) else Verdict(place, value=done)
        for place, done in zip(places, verdicts, strict=True)
    ]
    prepared = dict(zip(places, demand(told, "preparing"), strict=True))
    if len(places) <= FEW:
        for (site, host), made in prepared.items():
            say(f"{site}/{host or 'local'}: ready, {made.python}")
    all_of_them = f"{len(places)} nodes are" if len(places) > 1 else "1 node is"
    say(f"{record.run}: {all_of_them} ready ({time.monotonic() - began:.0f} s)")
    check_folders(plan, prepared, reach)
    check_text(plan, prepared, reach, say)
    cells = []
    for cell in plan.cells:
        members = []
        for node in cell.nodes:
            made = prepared[cell.site, node.host]
            folder = CellFolder(PurePosixPath(made.work_dir) / "runs" / record.mark / cell.name)
            members.append(
                NodeRecord(
                    cell=cell.index,
                    index=node.index,
                    site=cell.site,
                    host=node.host,
                    num_ranks=node.num_ranks,
                    python=str(made.python),
                    code=str(made.code),
                    supervisor=str(made.supervisor),
                    work_dir=str(made.work_dir),
                    cell_folder=str(folder.root),
                    folder=str(folder.node(node.index)),
                )
            )
        pace = None if cell.window is None else Pace.of(plan.recipe.exchange, cell.window)
        cells.append(CellRecord(index=cell.index, name=cell.name, site=cell.site, nodes=tuple(members), pace=pace))
    return records.change(record, cells=tuple(cells))


@contextmanager
def _or_undo(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> Iterator[None]:
    """Whatever ends the body before its time ends what the body had started."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, IslandError):
            reason = error.message
        elif isinstance(error, KeyboardInterrupt):
            reason = "the launch was interrupted by Ctrl-C"
        else:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
        say(f"{record.run}: the launch ends: clearing up")
        reason = hide(reason)
        now = records.load(record.run)
        report = end_everything(now, plan, reach, say)
        now = records.change(now, phase="failed", reason=reason, launcher_pid=0)
        for line in report.lines:
            say(line)
        if not now.gives_way:
            say(f"islandctl remove {now.run} frees the name {now.run}")
        raise


def _places(plan: Plan) -> str:
    sites = [f"{site.name} ({site.num_nodes} node{'s' if site.num_nodes > 1 else ''})" for site in plan.sites]
    return ", ".join(sites)
