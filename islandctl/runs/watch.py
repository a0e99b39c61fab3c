"""From gathered facts to one view of the run: pure, no clock and no I/O.

The order of trust: an exit record on the node, then the supervisor's state, then the workers' heartbeat. Nothing is
concluded from silence: an unreachable node is unknown, never failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.budget import BY_BUDGET
from islandctl.relay.messages import CellStatus, Heartbeat
from islandctl.runs.record import CellRecord, RunRecord
from islandctl.runs.status import (
    CellState,
    CellView,
    Culprit,
    Facts,
    NodeFacts,
    NodeView,
    RelayView,
    RunState,
    RunStatus,
)

SILENT_AFTER_S = 60.0
"""Heartbeats come every few seconds; a minute without one is worth a word."""
ALIVE_S = 10.0
"""Where no supervisor tells, a heartbeat as fresh as this one shows that workers live."""


def combine(record: RunRecord, facts: Facts) -> RunStatus:
    """One view of the run from everything that is known."""
    cells = tuple(_cell(cell, record, facts) for cell in record.cells)
    culprit = find_culprit(record, facts)
    state, detail, hint = _overall(record, facts, cells, culprit)
    known = [cell.step for cell in cells if cell.step is not None]
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
        eta_s=eta_s(cells, record.steps, record.tokens_per_step)
        if state in ("running", "degraded", "waiting")
        else None,
        cells=cells,
        relay=_relay(record, facts),
        joint_checkpoint=joint,
        culprit=culprit,
    )


def eta_s(cells: Sequence[CellView], steps: int, tokens_per_step: int) -> float | None:
    """Seconds until the slowest cell is through, at its present speed. None while a cell's speed is unknown."""
    rest = []
    for cell in cells:
        if cell.state == "finished":
            continue
        if cell.step is None or not cell.tokens_per_s:
            return None
        rest.append(max(0, steps - cell.step) * tokens_per_step / cell.tokens_per_s)
    return max(rest, default=0.0)


def find_culprit(record: RunRecord, facts: Facts) -> Culprit | None:
    """What failed first: the workers' own word before a mere exit code, earlier before later.

    All nodes of a cell read the same ``outcome.json``, so the place is the node that holds the rank it names.
    """
    failed = [node for node in facts.nodes if node.state is not None and node.state.outcome == "failed"]
    if not failed:
        return None
    spoken = [node for node in failed if node.outcome is not None and node.outcome.outcome == "failed"]
    first = min(spoken or failed, key=lambda node: (node.outcome.at if node.outcome else 0.0, node.cell, node.node))
    cell = record.cells[first.cell]
    rank, index = (first.outcome.rank if spoken and first.outcome else None), first.node
    if rank is not None:
        index = node_of_rank(cell, rank)
        first = next((node for node in failed if node.cell == first.cell and node.node == index), first)
    reason, hint = (first.state.reason if first.state else "") or "ended without a word", ""
    if spoken and first.outcome is not None:
        reason, hint = first.outcome.reason, first.outcome.hint
    return Culprit(
        site=cell.site,
        cell=cell.name,
        node=cell.nodes[index].label,
        rank=rank,
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


def _cell(cell: CellRecord, record: RunRecord, facts: Facts) -> CellView:
    nodes = [node for node in facts.nodes if node.cell == cell.index]
    seen = facts.relay.cells[cell.index] if facts.relay and cell.index < len(facts.relay.cells) else None
    beat, age, source = _heartbeat(seen, nodes, record.attempt)
    state, detail = _cell_state(record, nodes, beat, age)
    figures = {}
    if beat is not None:
        figures = {
            "step": beat.step,
            "bits_per_byte": beat.bits_per_byte,
            "loss": beat.loss,
            "tokens": beat.tokens,
            "tokens_per_s": beat.tokens_per_s,
            "rounds_sent": beat.rounds_applied,
            "rounds_late": beat.rounds_late,
            "rounds_skipped": beat.rounds_skipped,
        }
    return CellView.model_validate(
        {
            "cell": cell.index,
            "name": cell.name,
            "site": cell.site,
            "state": state,
            "detail": detail,
            **figures,
            "heartbeat_age_s": age,
            "restarts": sum(node.state.restarts for node in nodes if node.state),
            "bytes_up": seen.bytes_up if seen else None,
            "bytes_down": seen.bytes_down if seen else None,
            "source": source,
            "nodes": tuple(_node(cell, node) for node in nodes),
        }
    )


def _heartbeat(
    seen: CellStatus | None, nodes: Sequence[NodeFacts], attempt: int
) -> tuple[Heartbeat | None, float | None, str]:
    """The newest word of the cell's workers in this attempt, its age, and where it comes from."""
    if seen is not None and seen.heartbeat is not None and seen.heartbeat.attempt == attempt:
        return seen.heartbeat, seen.age_s, "relay"
    for node in nodes:
        if node.heartbeat is not None and node.heartbeat.attempt == attempt:
            return node.heartbeat, None, "files"
    return None, None, "none"


def _cell_state(
    record: RunRecord, nodes: Sequence[NodeFacts], beat: Heartbeat | None, age: float | None
) -> tuple[CellState, str]:
    states = [node.state for node in nodes]
    known = [state for state in states if state is not None]
    if any(state.outcome == "failed" for state in known):
        spoken = [node.outcome.reason for node in nodes if node.outcome and node.outcome.outcome == "failed"]
        plain = [state.reason for state in known if state.outcome == "failed"]
        return "failed", next(filter(None, [*spoken, *plain]), "")
    if known and len(known) == len(states) and all(state.outcome for state in known):
        return ("finished" if all(state.outcome == "finished" for state in known) else "stopped"), ""
    if any(state.state == "lost" for state in known):
        return _without_supervisor(nodes, beat, age)
    if any(state.state == "backoff" for state in known):
        reason = next((state.reason for state in known if state.state == "backoff"), "")
        return "restarting", reason
    fresh = beat is not None and age is not None and age < SILENT_AFTER_S
    if len(known) < len(states) or not states:
        trouble = next((node.trouble for node in nodes if node.state is None), "")
        if fresh and beat is not None:
            return beat.state, f"not reachable from here, but its heartbeat is: {trouble}".rstrip(": ")
        return "unreachable", trouble
    if record.phase == "failed" and all(state.state == "absent" for state in known):
        return "stopped", "was never started"
    if any(state.state == "absent" for state in known):
        return ("launching" if record.phase == "launching" else "lost"), ""
    if beat is None:
        return "starting", ""
    if age is not None and not fresh:
        return "silent", beat.message
    if beat.state in ("stopped", "failed") and record.phase == "launched":
        # the last words of a life that nobody asked to end: its supervisor starts the next one
        return "restarting", beat.message
    return beat.state, beat.message


def _without_supervisor(
    nodes: Sequence[NodeFacts], beat: Heartbeat | None, age: float | None
) -> tuple[CellState, str]:
    """Its workers may train on all the same, or have said how they ended."""
    said = next((node.outcome for node in nodes if node.outcome is not None), None)
    if said is not None and not said.retry:
        return said.outcome, said.reason
    if beat is not None and age is not None and age < ALIVE_S:
        return beat.state, "its supervisor was killed: nobody would start its workers again"
    return "lost", "the supervisor is gone without an exit record (reboot or kill -9)"


def _node(cell: CellRecord, facts: NodeFacts) -> NodeView:
    label = cell.nodes[facts.node].label
    if facts.state is None:
        return NodeView(node=facts.node, label=label, state="unreachable", detail=facts.trouble)
    detail = facts.state.reason
    return NodeView(
        node=facts.node, label=label, state=facts.state.state, restarts=facts.state.restarts, detail=detail
    )


def _relay(record: RunRecord, facts: Facts) -> RelayView:
    if record.relay is None and facts.relay_state is None:
        return RelayView(state="absent")
    if facts.relay is not None:
        return RelayView(
            state="answering",
            rounds_committed=facts.relay.rounds_committed,
            rounds_empty=facts.relay.rounds_empty,
            rounds_open=facts.relay.rounds_open,
            ledger_seq=facts.relay.ledger_seq,
        )
    down = facts.relay_state is not None and facts.relay_state.state in ("ended", "lost", "absent")
    return RelayView(state="ended" if down else "unreachable", detail=facts.relay_trouble)


def _overall(
    record: RunRecord, facts: Facts, cells: Sequence[CellView], culprit: Culprit | None
) -> tuple[RunState, str, str]:
    """State, one line why, and what to type next."""
    states = {cell.state for cell in cells}
    resume = f"islandctl resume {record.run}"
    if record.phase == "failed":
        return "failed", record.reason, "mend the cause, then launch again under another name (--run)"
    if record.phase == "launching":
        if facts.launcher_alive:
            return "launching", record.reason, ""
        return "failed", "the launch was cut short", f"islandctl stop {record.run} clears up what it started"
    if facts.relay is not None and facts.relay.halted:
        return "failed", f"halted: {facts.relay.halted}", f"{resume} goes back to the newest joint checkpoint"
    if culprit is not None:
        where = f"{culprit.cell}, node {culprit.node}" + ("" if culprit.rank is None else f", rank {culprit.rank}")
        return "failed", f"{where}: {culprit.reason}", culprit.hint
    if states == {"finished"}:
        if any(node.state in ("starting", "running", "stopping") for cell in cells for node in cell.nodes):
            return "running", "all steps are done; the last processes end", ""
        return "finished", "", f"islandctl stop {record.run} ends its relay" if facts.relay is not None else ""
    if states <= {"finished", "stopped"}:
        ends = [node.state.reason for node in facts.nodes if node.state is not None]
        spent = next((reason for reason in ends if reason.startswith(BY_BUDGET)), "")
        return "stopped", spent or record.reason, f"{resume} --budget '…' raises it" if spent else resume
    if states <= {"finished", "stopped", "lost"}:
        if record.phase == "stopped":
            return "stopped", record.reason, resume
        return "failed", "no supervisor runs any more (reboot or kill -9 of everything)", resume
    if states == {"unreachable"}:
        return "unknown", "no node answers and no heartbeat is known", "check the network, then ask again"
    troubled = [cell for cell in cells if cell.state in ("lost", "restarting", "silent", "unreachable", "stopped")]
    lost = [node for cell in cells for node in cell.nodes if node.state == "lost"]
    ended = [node for cell in cells if cell.state == "stopped" for node in cell.nodes if node.state == "ended"]
    mend = f"{resume} starts again what has ended"
    if troubled:
        first = troubled[0]
        hint = mend if lost or ended else ""
        return "degraded", f"{first.name} is {first.state}" + (f": {first.detail}" if first.detail else ""), hint
    if facts.relay is None:
        hint = mend if _relay(record, facts).state == "ended" else ""
        return "degraded", f"the relay does not answer; the cells train on: {facts.relay_trouble}".rstrip(": "), hint
    away = [cell.name for cell in facts.relay.cells if cell.away]
    if away:
        others = "go on without it" if record.late_then == "alone" else "wait for it"
        return "degraded", f"{', '.join(away)} counts as away; the others {others}", ""
    if lost:
        return "degraded", f"{lost[0].label}: the supervisor was killed; the workers train on", mend
    waiting = [cell for cell in cells if cell.state == "waiting"]
    if waiting:
        told = waiting[0].detail if waiting[0].detail.startswith("waits ") else ""
        return "waiting", told or f"{waiting[0].name} waits for a round", ""
    if states <= {"launching", "starting"}:
        return "launching", "the workers are starting", ""
    return "running", record.reason if record.phase == "stopping" else "", ""
