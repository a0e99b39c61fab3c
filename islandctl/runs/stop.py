"""Stop: a joint checkpoint, an orderly end, and the proof that no process of the run is left anywhere."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from pydantic import ValidationError

from islandctl.config.budget import BY_BUDGET
from islandctl.config.paths import RunFolder
from islandctl.errors import IslandError, UnreachableError, UsageError
from islandctl.fleet import node as nodes
from islandctl.fleet.job import SupervisorState
from islandctl.ledger.joint import joint_checkpoints
from islandctl.planner.plan import Plan
from islandctl.relay.messages import HEARTBEAT_S, RelayStatus
from islandctl.runs import record as records
from islandctl.runs.checkpoints import ledger_from_file
from islandctl.runs.files import only_one
from islandctl.runs.reach import Reach, Say, each, told
from islandctl.runs.record import FAILED, FINISHED, NodeRecord, RunRecord
from islandctl.runs.relay import STOP_TIMEOUT_S, client
from islandctl.runs.search import Found, everywhere, mark_in_files, places, search
from islandctl.runs.workers import stop_workers, supervisors

POLL_S = 0.5
STANDS_S = 6 * HEARTBEAT_S
"""So long cells stand still, while another one does not run, before no commit is expected from them any more."""


class Tells(Protocol):
    """The relay, as far as it is asked here."""

    def status(self) -> RelayStatus:
        """The whole view of the run."""


class StopReport(Found):
    """How a stop went."""

    finished: bool = False
    """The run was through its steps: there is nothing to resume."""
    checkpoint: int | None = None
    """Step of the newest joint checkpoint; null: there is none, or the relay's files cannot be read."""
    troubles: tuple[str, ...] = ()
    """What did not go in good order, though nothing is left of it."""
    spent: bool = False
    """Its budget is used up: a resume must raise it."""

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        lines = [*(f"trouble: {trouble}" for trouble in self.troubles), *super().lines]
        if self.finished:
            lines.append(f"{self.run} has finished")
        if self.checkpoint is not None:
            then = "" if self.finished else f"; islandctl resume {self.run}"
            then += " --budget '…'" if then and self.spent else ""
            lines.append(f"newest joint checkpoint: step {self.checkpoint}{then}")
        return lines


def stop(
    record: RunRecord, plan: Plan, say: Say, *, deadline_s: float, reason: str = "stopped by hand"
) -> StopReport:
    """Stop a run, whatever state it is in. How a run that had ended by itself came out stays as it is.

    Args:
        deadline_s: what the cells get to checkpoint and end together; 0 ends them at once.
        reason: goes into the record, and into the ledger where cells are asked to stop.
    """
    with (
        only_one(RunFolder.of(record.run).root / "lock", f"islandctl stop {record.run}"),
        Reach(plan, record.run, say) as reach,
    ):
        record = records.load(record.run)
        if record.phase == "launching" and not record.reached_workers:
            record = records.change(record, phase="failed", reason="the launch was cut short", launcher_pid=0)
        over = record.phase in ("failed", "stopped")
        if not over:
            seen = record.reason if record.phase == "launched" else ""
            record = records.change(record, phase="stopping", reason=_came_out(record, reach) or seen or reason)
        if record.reached_workers:
            _together(record, reach, say, deadline_s)
        report = end_everything(record, plan, reach, say)
        checkpoint = _newest_joint(record, reach)  # cells that were ended one by one have saved only now
        came_out = record.reason if over else _came_out(record, reach) or record.reason
        if not over and not report.exit_code:
            records.change(record, phase="stopped", reason=came_out)
        finished, spent = came_out == FINISHED, came_out.startswith(BY_BUDGET)
        return report.model_copy(update={"checkpoint": checkpoint, "finished": finished, "spent": spent})


def end_everything(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> StopReport:
    """End workers, relay and tunnels, in this order, and search every host for what is left."""
    workers = stop_workers(record, reach, record.nodes if record.reached_workers else ())
    relay = [(record.relay.host, record.relay.folder)] if record.relay else []
    tunnels = [("", str(RunFolder.of(record.run).tunnels / one.name)) for one in record.tunnels]

    def end(kept: tuple[str, str]) -> None:
        nodes.stop(reach.beside(kept[0]), kept[1], STOP_TIMEOUT_S + 10.0)

    ended = [(verdict.item[0].label, verdict.error) for verdict in workers]
    ended += [(verdict.item[1], verdict.error) for verdict in [*each(relay, end), *each(tunnels, end)]]
    troubles = [
        told(place, error) for place, error in ended if error is not None and not isinstance(error, UnreachableError)
    ]
    found = search(record.run, record.mark, places(record, plan), reach, end=True, record=record)
    return StopReport(**dict(found), troubles=tuple(troubles))


def stop_unreadable(run: str, trouble: UsageError, say: Say) -> StopReport:
    """End every process of a run whose record cannot be read, by the mark that they carry.

    Workers save what TERM leaves them time for.

    Args:
        trouble: what is wrong with the record.

    Raises:
        UsageError: ``trouble`` again, where nothing was ever started.
    """
    mark = mark_in_files(run)
    if not mark:
        raise trouble
    plan = records.load_plan(run)
    say(f"{trouble.message}; ending whatever carries the run's mark on its hosts")
    with (
        only_one(RunFolder.of(run).root / "lock", f"islandctl stop {run}"),
        Reach(plan, run, say) as reach,
    ):
        return StopReport(**dict(search(run, mark, everywhere(plan), reach, end=True)))


def _came_out(record: RunRecord, reach: Reach) -> str:
    """How all workers have ended by themselves, as the record's reason; empty while one lives or is not known."""
    if not record.reached_workers:
        return ""
    states = [verdict.value for verdict in supervisors(record, reach)]
    known = [state for state in states if state is not None and state.outcome]
    if len(known) < len(states):
        return ""
    if all(state.outcome == "finished" for state in known):
        return FINISHED
    if failed := next((state.reason for state in known if state.outcome == "failed"), None):
        return f"{FAILED}{failed}"
    return next((state.reason for state in known if state.reason.startswith(BY_BUDGET)), "")


def _together(record: RunRecord, reach: Reach, say: Say, deadline_s: float) -> None:
    """Ask the cells through the relay to checkpoint and end together; wait for it."""
    if deadline_s <= 0 or not (living := _living(record, reach)):
        return
    there = {node.cell for node in living}
    away = [cell.name for cell in record.cells if cell.index not in there]
    try:
        with client(record) as relay:
            if not has_trained(relay, record.attempt):
                say("no cell has trained yet: there is nothing to checkpoint")
                return
            relay.stop(record.reason)
            say("the cells checkpoint at the next commit and end")
            _wait(record, reach, say, deadline_s, Standstill(relay, there) if away else None, away)
    except IslandError as error:
        say(f"the relay cannot pass the word on ({error.message}); ending the workers one by one")


def _newest_joint(record: RunRecord, reach: Reach) -> int | None:
    """The step of the newest joint checkpoint, as the ledger's file has it."""
    try:
        joint = joint_checkpoints(ledger_from_file(record, reach), len(record.cells))
    except (IslandError, ValidationError):  # the report goes without it
        return None
    return joint[-1].step if joint else None


def has_trained(relay: Tells, attempt: int) -> bool:
    """Whether a cell has trained in this attempt.

    What the relay has last heard can be some seconds old, and one that was just started has heard nothing: a no
    counts only where it still holds after the next heartbeats.
    """
    end = time.monotonic() + 2 * HEARTBEAT_S
    while not (trained := _trained(relay.status(), attempt)) and time.monotonic() < end:
        time.sleep(POLL_S)
    return trained


def _trained(status: RelayStatus, attempt: int) -> bool:
    if status.attempt == attempt and status.rounds_committed + status.rounds_empty + status.rounds_open:
        return True
    beats = [cell.heartbeat for cell in status.cells if cell.heartbeat is not None]
    return any(beat.attempt == attempt and (beat.step > 0 or beat.state == "training") for beat in beats)


class Standstill:
    """Whether the cells wait for a round to which one that does not run would have to come.

    Its deadline may be far, and no checkpoint that comes of it is joint.

    Args:
        cells: numbers of those that run.
    """

    def __init__(self, relay: Tells, cells: Collection[int]) -> None:
        self._relay, self._cells = relay, cells
        self._seen: object = None
        self._since = time.monotonic()

    def lasts(self) -> bool:
        """Look: has nothing moved for ``STANDS_S``, with all cells that run waiting? Silence is no proof."""
        try:
            status = self._relay.status()
        except IslandError:
            self._seen = None
            return False
        beats = [one.heartbeat for one in status.cells if one.heartbeat is not None and one.cell in self._cells]
        stand = status.rounds_open > 0 and len(beats) == len(self._cells) and all(b.state == "waiting" for b in beats)
        seen = ([beat.step for beat in beats], status.rounds_committed + status.rounds_empty)
        if seen != self._seen or not stand:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since >= STANDS_S


def _wait(
    record: RunRecord, reach: Reach, say: Say, deadline_s: float, still: Standstill | None, away: list[str]
) -> None:
    end = time.monotonic() + deadline_s
    restarts: dict[NodeRecord, int] = {}
    said: set[str] = set()
    while time.monotonic() < end:
        waited_for = False
        for verdict in supervisors(record, reach):
            node, state = verdict.item, verdict.value
            if state is not None:
                restarts.setdefault(node, state.restarts)
            news = not_waited_for(state, restarts.get(node, 0))
            waited_for |= not news
            line = f"{node.known_as(state.node if state is not None else '')}: {news}"
            if news and line not in said:
                said.add(line)
                say(line)
        if not waited_for:
            return
        if still is not None and still.lasts():
            say(f"no commit comes without {', '.join(away)}; the other cells save where they stand, and end")
            return
        time.sleep(POLL_S)
    say(f"not all cells ended within {deadline_s:g} s; their supervisors end them now")


def not_waited_for(state: SupervisorState | None, restarts: int) -> str:
    """Why the end of a node that was asked to save is not waited for (any more); empty: it is.

    Args:
        state: None: the node cannot be asked.
        restarts: so many it had when it was asked.
    """
    if state is None:
        return "not reached, so it is not known whether it ends"
    if not state.runs:
        return "its job waits in the queue" if state.lives else "ended"
    if state.restarts > restarts + 1:
        return f"dies whenever it is started ({state.last}); its supervisor ends it now"
    return ""


def _living(record: RunRecord, reach: Reach) -> list[NodeRecord]:
    """Nodes whose supervisor runs. One that cannot be asked is not waited for: its state is unknown."""
    return [verdict.item for verdict in supervisors(record, reach) if verdict.value and verdict.value.runs]
