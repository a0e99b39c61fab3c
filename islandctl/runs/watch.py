"""From gathered facts to one view of the run: pure, no clock and no I/O.

Nothing is concluded from silence: an unreachable node is unknown, never failed. How a cell is judged: ``cells.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.budget import BY_BUDGET
from islandctl.fleet.supervisor import ASKED, MEMORY, PEER_LOST, PREEMPTED
from islandctl.fleet.supervisor import LIVE as _LIVE
from islandctl.relay.messages import UNSAVED
from islandctl.runs.cells import cell_view, spoke
from islandctl.runs.record import FINISHED, CellRecord, RunRecord
from islandctl.runs.status import CellView, Culprit, Facts, RelayView, RunState, RunStatus

_ASK_AGAIN = "mend what is named there (network, login, host key), then ask again"
_TRAINING = ("training", "waiting", "evaluating", "checkpointing")
_HINTS = {
    MEMORY: "the node's memory does not hold it: fewer ranks on it, or a smaller data.limit_bytes; see islandctl plan"
}
"""For ends of which the workers could say nothing."""


def combine(record: RunRecord, facts: Facts) -> RunStatus:
    """One view of the run from everything that is known."""
    cells = tuple(cell_view(cell, record, facts) for cell in record.cells)
    culprit = find_culprit(record, facts)
    state, detail, hint = _overall(record, facts, cells, culprit)
    if facts.at_work:
        hint = ""  # the next command would only be refused
    known = [record.cells[cell.cell].run_step(cell.step) for cell in cells if cell.step is not None]
    going = state in ("running", "degraded", "waiting")
    eta = eta_s(cells, record.steps, record.tokens_per_step) if going else None
    left = [node.state.budget_left_s for node in facts.nodes if node.state and node.state.budget_left_s is not None]
    left_s = min(left, default=None) if going else None
    short = eta is not None and left_s is not None and left_s < eta
    joint = facts.relay.joint_checkpoints[-1] if facts.relay and facts.relay.joint_checkpoints else facts.joint
    return RunStatus(
        run=record.run,
        state=state,
        detail=detail,
        hint=hint,
        attempt=record.attempt,
        created=record.created,
        config_hash=record.config_hash,
        step=min(known) if len(known) == len(cells) and known else None,
        steps=record.steps,
        eta_s=eta,
        budget_left_s=left_s,
        budget_step=step_in(left_s, cells, record) if short and left_s else None,
        cells=cells,
        relay=_relay(record, facts),
        joint_checkpoint=joint,
        culprit=culprit,
    )


def eta_s(cells: Sequence[CellView], steps: int, tokens_per_step: int) -> float | None:
    """Seconds until the slowest cell is through, at its present speed. None while a cell is not known to move."""
    rest = []
    for cell in cells:
        if cell.state == "finished":
            continue
        if cell.step is None or not cell.tokens_per_s:
            return None
        rest.append(max(0, (cell.steps or steps) - cell.step) * tokens_per_step / cell.tokens_per_s)
    return max(rest, default=0.0)


def step_in(seconds: float, cells: Sequence[CellView], record: RunRecord) -> int:
    """The step where the slowest cell is then, at the present speed of cells that are known to move."""
    moving = [
        (cell.cell, cell.step, cell.tokens_per_s) for cell in cells if cell.step is not None and cell.tokens_per_s
    ]
    then = [
        record.cells[cell].run_step(int(step + seconds * rate / record.tokens_per_step))
        for cell, step, rate in moving
    ]
    return min([*then, record.steps])


def find_culprit(record: RunRecord, facts: Facts) -> Culprit | None:
    """What failed first: not who lost a peer; the workers' own word before a mere exit code, earlier before later.

    All nodes of a cell read the same ``outcome.json``, so the place is the node that holds the rank it names.
    """
    failed = [node for node in facts.nodes if node.state is not None and node.state.outcome == "failed"]
    if not failed:
        return None
    failed = [node for node in failed if node.state is not None and node.state.kind != PEER_LOST] or failed
    spoken = [node for node in failed if spoke(node)]
    first = min(spoken or failed, key=lambda node: (node.outcome.at if node.outcome else 0.0, node.cell, node.node))
    cell = record.cells[first.cell]
    rank, index = (first.outcome.rank if spoken and first.outcome else None), first.node
    if rank is None and first.state is not None:
        rank = first.state.rank
    if rank is not None:
        index = node_of_rank(cell, rank)
        first = next((node for node in failed if node.cell == first.cell and node.node == index), first)
    kind = first.state.kind if first.state else ""
    reason, hint = (first.state.reason if first.state else "") or "ended without a word", _HINTS.get(kind, "")
    if spoken and first.outcome is not None:
        reason, hint = first.outcome.reason, first.outcome.hint
    states = [node.state for node in facts.nodes if (node.cell, node.node) == (cell.index, index)]
    return Culprit(
        site=cell.site,
        cell=cell.name,
        node=cell.nodes[index].known_as(states[0].node if states and states[0] else ""),
        rank=rank,
        kind=kind,
        reason=reason,
        hint=hint or f"islandctl logs {record.run} --site {cell.site} --tail 100",
        lines=first.lines,
    )


def node_of_rank(cell: CellRecord, rank: int) -> int:
    """The index of the node that holds ``rank``; the last one for a rank beyond all."""
    first = 0
    for node in cell.nodes:
        first += node.num_ranks
        if rank < first:
            return node.index
    return cell.nodes[-1].index


def _relay(record: RunRecord, facts: Facts) -> RelayView:
    state = facts.relay_state
    if record.relay is None and state is None:
        return RelayView(state="absent")
    if facts.relay is not None:
        return RelayView(
            state="answering",
            rounds_committed=facts.relay.rounds_committed,
            rounds_empty=facts.relay.rounds_empty,
            rounds_open=facts.relay.rounds_open,
            ledger_seq=facts.relay.ledger_seq,
        )
    if state is not None and state.state in ("lost", "absent"):
        return RelayView(state="lost", detail=state.reason or "its supervisor's files are gone")
    if state is not None and state.state == "ended":
        asked = state.outcome == "stopped" and state.reason == ASKED
        return RelayView(state="ended", detail="" if asked else state.reason or "nobody knows why")
    return RelayView(state="unreachable", detail=facts.relay_trouble)


def _overall(
    record: RunRecord, facts: Facts, cells: Sequence[CellView], culprit: Culprit | None
) -> tuple[RunState, str, str]:
    """State, one line why, and what to type next."""
    resume = f"islandctl resume {record.run}"
    if record.phase == "failed":
        free = "" if record.gives_way else f"; islandctl remove {record.run} frees its name"
        return "failed", record.reason, f"mend the cause, then launch again{free}"
    if record.phase == "launching":
        return _launching(record, facts, cells)
    if facts.relay is not None and facts.relay.halted:
        return "failed", f"halted: {facts.relay.halted}", f"{resume} goes back to the newest joint checkpoint"
    if culprit is not None:
        rank = "" if culprit.rank is None or culprit.reason.startswith("rank ") else f", rank {culprit.rank}"
        where = f"{culprit.cell}, node {culprit.node}{rank}"
        kind = f"{culprit.kind}: " if culprit.kind not in ("", "crash") else ""
        return "failed", f"{where}: {kind}{culprit.reason}", culprit.hint
    return _ended(record, facts, cells) or _troubled(record, facts, cells) or _going(record, facts, cells)


def _launching(record: RunRecord, facts: Facts, cells: Sequence[CellView]) -> tuple[RunState, str, str]:
    """The phase of a launch, and of a resume once it has begun a new attempt."""
    if facts.launcher_alive:
        return "launching", record.reason, ""
    what, clear = ("launch" if record.attempt == 1 else "resume"), f"islandctl stop {record.run}"
    gone = f"the {what} was cut short: the process that was at it is gone"
    nodes = [node for cell in cells for node in cell.nodes]
    if any(node.state in _LIVE for node in nodes) or any(cell.state in _TRAINING for cell in cells):
        mend = f"{clear} ends them; islandctl resume {record.run} then goes on"
        return "degraded", f"{gone}; workers run all the same", mend
    if silent := next((node.label for node in nodes if node.state == "unreachable"), ""):
        return "unknown", f"{gone}; what runs on {silent} is not known", _ASK_AGAIN
    if record.attempt > 1:
        return "failed", gone, f"islandctl resume {record.run} begins it again"
    free = f"islandctl remove {record.run} frees the name"
    return "failed", gone, f"{clear} clears up what it started; {free}"


def _ended(record: RunRecord, facts: Facts, cells: Sequence[CellView]) -> tuple[RunState, str, str] | None:
    """Every cell has ended, by its supervisor's record; None: not so."""
    states = {cell.state for cell in cells}
    proven = record.phase == "stopped"  # a stop has searched every host
    if not states <= {"finished", "stopped", "lost"} | ({"unreachable"} if proven else set()):
        return None
    if facts.at_work.startswith(f"islandctl resume {record.run}"):
        return "launching", f"{facts.at_work} is at work", ""
    if states == {"finished"}:
        if any(node.state in ("starting", "running", "stopping") for cell in cells for node in cell.nodes):
            return "running", "all steps are done; the last processes end", ""
        return "finished", "", f"islandctl stop {record.run} ends its relay" if facts.relay is not None else ""
    resume = f"islandctl resume {record.run}"
    silent = [node.label for cell in cells for node in cell.nodes if node.state == "unreachable"]
    unasked = f"{', '.join(silent)} cannot be asked now" if silent else ""
    if proven and record.reason == FINISHED:
        return "finished", unasked, ""
    if "lost" not in states or proven:
        ends = [node.state.reason for node in facts.nodes if node.state is not None]
        spent = next((reason for reason in (*ends, record.reason) if reason.startswith(BY_BUDGET)), "")
        taken = next((cell.detail for cell in cells if cell.detail.startswith(PREEMPTED)), "")
        why = "; ".join(filter(None, (spent or record.reason or taken, unasked)))
        return "stopped", why, f"{resume} --budget '…' raises it" if spent else resume
    return "failed", "no supervisor runs any more (reboot or kill -9 of everything)", resume


def _troubled(record: RunRecord, facts: Facts, cells: Sequence[CellView]) -> tuple[RunState, str, str] | None:
    """Something is amiss though not everything has ended; None: nothing is."""
    if all(cell.state == "unreachable" for cell in cells):
        return "unknown", "no node answers and no heartbeat is known", _ASK_AGAIN
    stopping = record.phase == "stopping"
    if stopping and not facts.at_work:
        return "degraded", "its stop did not come to its end", f"islandctl stop {record.run}"
    amiss = {"lost", "restarting", "unreachable"} | (set() if stopping else {"ending", "stopped"})
    amiss |= {"silent"} if facts.relay is not None else set()  # without a relay its files alone are silent
    lost = [node for cell in cells for node in cell.nodes if node.state == "lost"]
    ended = [node for cell in cells if cell.state == "stopped" for node in cell.nodes if node.state == "ended"]
    mend = f"islandctl resume {record.run} starts again what has ended"
    if first := next((cell for cell in cells if cell.state in amiss), None):
        hint = mend if (lost or ended) and not stopping else ""
        return "degraded", f"{first.name} is {first.state}" + (f": {first.detail}" if first.detail else ""), hint
    if facts.relay is None:
        relay = _relay(record, facts).state
        hint = mend if relay in ("ended", "lost") and not stopping else ""
        detail = f"the relay does not answer{_without_relay(cells)}: {facts.relay_trouble}".rstrip(": ")
        return "degraded", detail, hint
    queued = {cell.name for cell in cells if cell.state == "pending"}
    away = [cell.name for cell in facts.relay.cells if cell.away and cell.name not in queued]
    if away:
        others = "go on without it" if record.late_then == "alone" else "wait for it"
        return "degraded", f"{', '.join(away)} counts as away; the others {others}", ""
    if lost:
        return "degraded", f"{lost[0].label}: the supervisor was killed; the workers train on", mend
    if unsaved := next((cell for cell in cells if cell.detail.startswith(UNSAVED)), None):
        where = f"free space on {unsaved.nodes[0].label} below {record.cells[unsaved.cell].nodes[0].work_dir}"
        return "degraded", f"{unsaved.name}: {unsaved.detail}", f"{where}; the next one is tried as planned"
    return None


def _without_relay(cells: Sequence[CellView]) -> str:
    """What the cells do meanwhile, as far as their files tell."""
    if still := [cell.name for cell in cells if cell.state == "waiting"]:
        return f"; standing still until it does, at most for late.relay_away: {', '.join(still)}"
    if silent := [f"{cell.name} ({cell.detail})" for cell in cells if cell.state == "silent"]:
        return f"; not known to train on: {', '.join(silent)}"
    return "; the cells train on" if any(cell.tokens_per_s for cell in cells) else ""


def _going(record: RunRecord, facts: Facts, cells: Sequence[CellView]) -> tuple[RunState, str, str]:
    """Nothing is amiss."""
    queued = [cell for cell in cells if cell.state == "pending"]
    if queued:
        moves = any(cell.tokens_per_s for cell in cells)
        state: RunState = "pending" if len(queued) == len(cells) else "running" if moves else "waiting"
        return state, f"{queued[0].name} is pending: {queued[0].detail}", ""
    waiting = [cell for cell in cells if cell.state == "waiting"]
    if waiting:
        told = waiting[0].detail if waiting[0].detail.startswith("waits ") else ""
        return "waiting", told or f"{waiting[0].name} waits for a round", ""
    starting = [cell.name for cell in cells if cell.state in ("launching", "starting")]
    if len(starting) == len(cells):
        return "launching", "the workers are starting", ""
    if record.phase == "stopping":
        return "running", record.reason, ""
    return "running", f"the workers of {', '.join(starting)} are starting" if starting else "", ""
