"""Resume: all cells go back to one joint checkpoint and go on from there, under a new attempt.

A run of which a part still lives is mended instead: what is dead starts again and catches up, the rest trains on.
Workers that have only lost their supervisor cannot be given another one: they save, end, and go on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from islandctl.config.budget import Budget
from islandctl.config.paths import RunFolder
from islandctl.config.recipe import Recipe
from islandctl.config.secrets import hide, values
from islandctl.errors import BudgetError, IslandError, UnreachableError, UsageError
from islandctl.fleet import node as nodes
from islandctl.fleet.hostkeys import Ask
from islandctl.fleet.job import SupervisorState
from islandctl.fleet.supervisor import span
from islandctl.ledger.entries import Rewind
from islandctl.ledger.joint import joint_checkpoints, unjoined
from islandctl.planner.budget import budget_seconds
from islandctl.planner.file import changed_sources
from islandctl.planner.plan import Plan
from islandctl.runs import record as records
from islandctl.runs import secrets
from islandctl.runs.checkpoints import read_ledger, verify
from islandctl.runs.choice import Choice, choose
from islandctl.runs.files import only_one
from islandctl.runs.network import restart_relay, silent
from islandctl.runs.reach import Reach, Say, demand, each
from islandctl.runs.record import NodeRecord, RunRecord
from islandctl.runs.relay import client
from islandctl.runs.sources import check_recipe, script_notes
from islandctl.runs.stop import end_everything
from islandctl.runs.workers import Group, groups, restart_workers, start_workers, supervisors, write_cells


def resume(
    record: RunRecord,
    plan: Plan,
    say: Say,
    ask: Ask | None = None,
    *,
    step: int | None = None,
    budget: Budget | None = None,
) -> RunRecord:
    """Bring a run back to running workers, whatever has ended of it, in whatever way.

    Args:
        ask: puts a question to the person; None: nobody is there.
        step: a joint checkpoint's step; 0: from the beginning; None: the newest one.
        budget: from now on in place of the recipe's; what was used before counts.

    Raises:
        BudgetError: the budget is used up.
        UsageError: the whole run still runs, has finished, never got to its workers, or its recipe has changed; no
            such checkpoint.
        CheckpointError: no joint checkpoint can be used.
        UnreachableError: a node or the relay cannot be asked. Nothing has been changed then.
    """
    records.check_plan_of(record, plan)
    secrets.know(plan)
    for name in sorted({*plan.recipe.worker.secrets} - {*values(plan.recipe.worker.secrets)}):
        say(f"note: {name} is not set here; the nodes keep the value that they have")
    notes = check_recipe(plan, lambda path: _changed_recipe(plan, path), run=record.run)
    for note in notes + script_notes(plan, changed_sources(plan)):
        say(f"note: {note}")
    with (
        only_one(RunFolder.of(record.run).root / "lock", f"islandctl resume {record.run}"),
        Reach(plan, record.run, say, ask) as reach,
    ):
        record = records.load(record.run)
        states = _ask(record, reach)
        if any(state.lives for state in states.values()):
            return _mend(record, reach, say, states, anew=step is not None or budget is not None)
        _check_unfinished(record, states, step)
        _check_budget(record, plan, reach, budget or record.budget or plan.recipe.budget)
        if budget is not None:
            record = records.change(record, budget=budget)
        try:
            restart_relay(record, reach, say)
            record = _rewind(record, reach, say, step, plan.recipe.exchange.fragments)
            write_cells(record, plan, reach)
            start_workers(record, plan, reach, say)
        except BaseException as error:
            reason = hide(error.message) if isinstance(error, IslandError) else type(error).__name__
            end_everything(record, plan, reach, say)
            records.change(record, phase="stopped", reason=f"the resume failed: {reason}", launcher_pid=0)
            raise
        return records.change(record, phase="launched", reason="", launcher_pid=0)


def _rewind(record: RunRecord, reach: Reach, say: Say, step: int | None, num_fragments: int) -> RunRecord:
    """Choose and verify a joint checkpoint, and begin the new attempt there."""
    cells = [cell.name for cell in record.cells]
    with client(record, retry_s=30.0, timeout_s=30.0) as relay:
        entries = read_ledger(relay)
        choice: Choice = choose(
            joint_checkpoints(entries, len(cells)),
            unjoined(entries, cells),
            lambda joint: verify(record, reach, joint),
            step=step,
        )
        for line in choice.passed_over:
            say(f"passed over {line}")
        beginning = (0,) * num_fragments
        manifests, versions = (choice.joint.manifests, choice.joint.versions) if choice.joint else ((), beginning)
        entry = relay.rewind(choice.step, manifests, versions)
    if not isinstance(entry, Rewind):
        raise UnreachableError(f"the relay answered a rewind with an entry of kind {entry.kind}")
    say(f"{record.run}: attempt {entry.attempt} begins at {choice.text}")
    return records.change(record, attempt=entry.attempt, phase="launching", reason="", launcher_pid=os.getpid())


def _ask(record: RunRecord, reach: Reach) -> dict[NodeRecord, SupervisorState]:
    """What the workers' supervisors do.

    Raises:
        UsageError: the launch never got to them.
        UnreachableError: a node cannot be asked; what runs there is unknown.
    """
    if record.phase == "failed" or not record.reached_workers:
        raise UsageError(
            f"{record.run}: its launch never got to the workers; there is nothing to resume",
            hint="islandctl launch starts it anew"
            + ("" if record.gives_way else f"; islandctl remove {record.run} frees its name"),
        )
    states = demand(supervisors(record, reach), "asking whether workers still run")
    return dict(zip(record.nodes, states, strict=True))


def _check_unfinished(record: RunRecord, states: Mapping[NodeRecord, SupervisorState], step: int | None) -> None:
    if step is None and all(state.outcome == "finished" for state in states.values()):
        raise UsageError(
            f"{record.run} has finished: there is nothing left to do",
            hint=f"to repeat a part of it: islandctl resume {record.run} --from STEP (islandctl checkpoints "
            f"{record.run} lists the steps)",
        )


def _check_budget(record: RunRecord, plan: Plan, reach: Reach, budget: Budget) -> None:
    """The supervisors count (``used.json``); a run whose budget is used up would end again at once."""
    allowed = budget_seconds(plan, budget)
    if allowed is None:
        return

    def ask(node: NodeRecord) -> float:
        data = nodes.read(reach.host(node.site, node.host), f"{node.folder}/used.json").data
        return float(json.loads(data)["seconds"]) if data else 0.0

    used = max(demand(each(record.nodes, ask), "asking what is used of the budget"))
    if used >= allowed:
        raise BudgetError(
            f"{record.run}: its budget is used up: {span(used)} of {span(allowed)}",
            hint=f"islandctl resume {record.run} --budget LIMIT raises it, in all, as '24 h' or '800 USD'",
        )


def _mend(
    record: RunRecord, reach: Reach, say: Say, states: Mapping[NodeRecord, SupervisorState], *, anew: bool
) -> RunRecord:
    """Part of the run lives: start again what does not, and leave the rest alone.

    Raises:
        UsageError: everything runs, or the run is being stopped, or what is asked for takes a new attempt (``anew``).
    """
    dead = [node for node, state in states.items() if not state.lives and state.outcome != "finished"]
    names = ", ".join(dict.fromkeys(node.known_as(state.node) for node, state in states.items() if state.lives))
    if anew or record.phase != "launched" or not (dead or silent(record, reach)):
        raise UsageError(
            f"{record.run} still runs on {names}",
            hint=f"islandctl status {record.run}; islandctl stop {record.run} ends it first",
        )
    if record.reason:  # an end that it was seen to have come to is over
        record = records.change(record, reason="")
    say(f"{record.run} still runs on {names}: starting again only what does not")
    restart_relay(record, reach, say)

    def again(group: Group) -> None:
        how = "its workers save, end and start" if states[group[0]].orphans else "starting its workers"
        say(f"{group[0].label}: {how} again")
        restart_workers(group, reach)

    demand(each(groups(record, dead, reach), again), "starting the workers again")
    return record


def _changed_recipe(plan: Plan, path: str) -> Recipe | None:
    """The recipe in ``path``, when that is the plan's recipe (its first source) and the file has changed since."""
    from islandctl.config.load import load_recipe, text_hash

    if path != next(iter(plan.sources)) or not Path(path).is_file() or text_hash(path) == plan.sources[path]:
        return None
    return load_recipe(path).value
