"""One cell's view: pure, no clock and no I/O.

The order of trust: an exit record on the node, then the supervisor's state, then the workers' heartbeat. A worker's
last words say how it ended; whether the cell has ended with it is its supervisor's word alone.

A rate is shown only of a cell that is known to move: it says so now, and its last step is not overdue.
"""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.fleet.supervisor import PEER_LOST, PREEMPTED
from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.runs.record import CellRecord, RunRecord
from islandctl.runs.status import CellState, CellView, Facts, NodeFacts, NodeView

SILENT_AFTER_S = 60.0
"""Heartbeats come every few seconds; a minute without one is worth a word."""
FRESH_S = 10.0
"""So long a word holds for the present: some heartbeats may be late."""
OVERDUE_STEPS = 3.0
"""A step that has not come after so many times its usual length is not about to come."""
_MOVING = ("training", "waiting", "evaluating", "checkpointing")
"""What workers say of themselves while the run goes on."""


def cell_view(cell: CellRecord, record: RunRecord, facts: Facts) -> CellView:
    """What is known of one cell."""
    nodes = [node for node in facts.nodes if node.cell == cell.index]
    seen = facts.relay.cells[cell.index] if facts.relay and cell.index < len(facts.relay.cells) else None
    beat, age, source = _heartbeat(cell.index, nodes, facts.relay, record.attempt)
    if beat is not None and source == "relay" and not beat.step:
        beat = beat.model_copy(update={"step": cell.own_step(_begins_at(record, facts))})
    state, detail = _state(record, nodes, beat, age if source == "relay" else None)
    still = seen.still_s if seen is not None and source == "relay" else age
    state, detail = _present(state, detail, source, beat, still, record.tokens_per_step)
    if seen is not None and seen.away and state in (*_MOVING, "silent"):
        state = "away"
    heard = age is not None and (source == "files" or age < FRESH_S)
    moves = heard and beat is not None and _moves(state, beat, still, record.tokens_per_step)
    figures = {}
    if beat is not None:
        figures = {
            "step": beat.step,
            "bits_per_byte": beat.bits_per_byte,
            "loss": beat.loss,
            "tokens": beat.tokens or (None if beat.step else 0),
            "tokens_per_s": beat.tokens_per_s if moves else None,
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
            **_own_steps(cell, record.steps, None if beat is None else beat.step),
            **figures,
            "heartbeat_age_s": age,
            "restarts": sum(node.state.restarts for node in nodes if node.state),
            "last_end": _last_end(nodes),
            "bytes_up": seen.bytes_up if seen else None,
            "bytes_down": seen.bytes_down if seen else None,
            "source": source,
            "nodes": tuple(_node(cell, node) for node in nodes),
        }
    )


def _own_steps(cell: CellRecord, steps: int, step: int | None) -> dict[str, int | None]:
    """Where the cell is by steps of its own; empty where its steps are the run's."""
    if cell.pace is None:
        return {}
    total = cell.pace.own_step(steps)
    behind = None if step is None else cell.pace.windows(step)
    return {"steps": total, "window": behind, "windows": cell.pace.windows(total)}


def _begins_at(record: RunRecord, facts: Facts) -> int:
    """The run's step at which the attempt has begun: workers that have yet to be restored tell 0."""
    joint = facts.relay.joint_checkpoints[-1] if facts.relay and facts.relay.joint_checkpoints else facts.joint
    return joint.step if joint is not None and record.attempt > 1 else 0


def told_by_relay(relay: RelayStatus | None, cell: int, attempt: int) -> bool:
    """Has the relay figures of the cell in this attempt? Workers that have just come back tell none at first."""
    beat = relay.cells[cell].heartbeat if relay is not None and cell < len(relay.cells) else None
    if beat is None or beat.attempt != attempt or beat.state == "starting":
        return False
    return beat.step > 0 or bool(beat.bits_per_byte)


def _heartbeat(
    cell: int, nodes: Sequence[NodeFacts], relay: RelayStatus | None, attempt: int
) -> tuple[Heartbeat | None, float | None, str]:
    """The newest word of the cell's workers in this attempt, its age, and where it comes from.

    A word without figures gets those that the cell's file holds, so that bar and curve go on where they were. A file
    in which the same life has trained is newer than that life's word of its start.
    """
    filed = next((node.heartbeat for node in nodes if node.heartbeat and node.heartbeat.attempt == attempt), None)
    seen = relay.cells[cell] if relay is not None and cell < len(relay.cells) else None
    told = seen.heartbeat if seen is not None and seen.heartbeat and seen.heartbeat.attempt == attempt else None
    if told is None or seen is None:
        age = next((node.heartbeat_age_s for node in nodes if node.heartbeat is filed), None)
        return filed, age, "none" if filed is None else "files"
    if filed is not None and not told_by_relay(relay, cell, attempt):
        if told.state in ("starting", "waiting") and filed.state == "training" and filed.life == told.life != "":
            return filed, seen.age_s, "relay"
        own = {"state": told.state, "life": told.life, "message": told.message or filed.message}
        told = filed.model_copy(update={**own, "tokens_per_s": told.tokens_per_s})
    return told, seen.age_s, "relay"


def _present(
    state: CellState, detail: str, source: str, beat: Heartbeat | None, still: float | None, tokens_per_step: int
) -> tuple[CellState, str]:
    """The state as of now. A file tells what was, and says nothing of a loop that stands still."""
    if state != "training" or beat is None or still is None or still < _patience_s(beat, tokens_per_step):
        return state, detail
    said = f"nothing new in its files for {still:.0f} s" if source == "files" else f"no new step for {still:.0f} s"
    return "silent" if source == "files" else state, "; ".join(filter(None, (detail, said)))


def _moves(state: CellState, beat: Heartbeat, still: float | None, tokens_per_step: int) -> bool:
    """Is a cell that was just heard of known to get on at the rate that it told?

    Args:
        still: seconds since the present step was first told.
    """
    if state not in _MOVING or not beat.tokens_per_s or still is None:
        return False
    return state in ("evaluating", "checkpointing") or still < _patience_s(beat, tokens_per_step)


def _patience_s(beat: Heartbeat, tokens_per_step: int) -> float:
    """How long after a step the next one may take to be told."""
    step_s = tokens_per_step / beat.tokens_per_s if beat.tokens_per_s else 0.0
    return FRESH_S + OVERDUE_STEPS * step_s


def _state(
    record: RunRecord, nodes: Sequence[NodeFacts], beat: Heartbeat | None, age: float | None
) -> tuple[CellState, str]:
    states = [node.state for node in nodes]
    known = [state for state in states if state is not None]
    if any(state.outcome == "failed" for state in known):
        spoken = [node.outcome.reason for node in nodes if node.outcome and spoke(node)]
        ends = [state for state in known if state.outcome == "failed"]
        plain = [state.reason for state in sorted(ends, key=lambda state: state.kind == PEER_LOST)]
        return "failed", next(filter(None, [*spoken, *plain]), "")
    if known and len(known) == len(states) and all(state.outcome for state in known):
        taken = next((f"{state.kind}: {state.reason}" for state in known if state.kind == PREEMPTED), "")
        return ("finished" if all(state.outcome == "finished" for state in known) else "stopped"), taken
    if any(state.state == "pending" for state in known):
        return "pending", next(state.reason or state.last for state in known if state.state == "pending")
    if any(state.state == "lost" for state in known):
        return _without_supervisor(nodes, beat, age)
    if any(state.state == "backoff" for state in known):
        return "restarting", _last_end(nodes)
    if len(known) < len(states) or not states:
        trouble = next((node.trouble for node in nodes if node.state is None), "")
        if beat is not None and age is not None and age < FRESH_S:
            said, _ = _word(beat, age)
            return said, f"not reachable from here, but its heartbeat is: {trouble}".rstrip(": ")
        last = f"its last heartbeat came {age:.0f} s ago" if beat is not None and age is not None else ""
        return "unreachable", "; ".join(filter(None, (trouble, last)))
    if record.phase == "failed" and all(state.state == "absent" for state in known):
        return "stopped", "was never started"
    if any(state.state == "absent" for state in known):
        return ("launching" if record.phase == "launching" else "lost"), ""
    if beat is None or _of_earlier_life(nodes, beat):
        if any(state.restarts for state in known):
            return "restarting", _last_end(nodes)
        return "starting", next((state.reason for state in known if state.reason), "")
    return _word(beat, age)


def spoke(node: NodeFacts) -> bool:
    """Have the node's workers told in their own words why they failed? A peer that was lost is no cause."""
    told, state = node.outcome, node.state
    if told is None or told.outcome != "failed" or told.kind == PEER_LOST:
        return False
    return state is None or state.signal is None or state.rank in (None, told.rank)


def _of_earlier_life(nodes: Sequence[NodeFacts], beat: Heartbeat) -> bool:
    """Was this said before the workers were last started? The supervisor of node 0, where rank 0 is, knows."""
    keeper = next((node.state for node in nodes if node.node == 0), None)
    return keeper is not None and (keeper.state == "starting" or beat.life not in ("", keeper.life))


def _word(beat: Heartbeat, age: float | None) -> tuple[CellState, str]:
    """What the workers say of themselves. Of an end only the supervisor knows whether it is one."""
    if beat.state in ("stopped", "failed"):
        return "ending", f"its workers have ended ({beat.message or beat.state}); its supervisor decides"
    if beat.state != "finished" and age is not None and age >= SILENT_AFTER_S:
        return "silent", beat.message
    return beat.state, beat.message


def _without_supervisor(
    nodes: Sequence[NodeFacts], beat: Heartbeat | None, age: float | None
) -> tuple[CellState, str]:
    """Its workers may train on all the same, or have said how they ended."""
    said = next((node.outcome for node in nodes if node.outcome is not None), None)
    if said is not None and not said.retry:
        return said.outcome, said.reason
    lost = [node.state for node in nodes if node.state is not None and node.state.state == "lost"]
    if all(state.orphans for state in lost):
        now = "starting" if beat is None or _of_earlier_life(nodes, beat) else _word(beat, age)[0]
        return now, "its supervisor was killed: nobody would start its workers again"
    told = next((": ".join(filter(None, (state.kind, state.reason))) for state in lost if state.reason), "")
    return "lost", told or "the supervisor is gone without an exit record (reboot or kill -9)"


def _last_end(nodes: Sequence[NodeFacts]) -> str:
    """Why the workers last ended though nobody had asked them to: of the first node that did not just lose a peer."""
    ends = [node.state for node in nodes if node.state is not None and node.state.last]
    return next((state.last_end for state in sorted(ends, key=lambda state: state.last_kind == PEER_LOST)), "")


def _node(cell: CellRecord, facts: NodeFacts) -> NodeView:
    record = cell.nodes[facts.node]
    if facts.state is None:
        return NodeView(node=facts.node, label=record.label, state="unreachable", detail=facts.trouble)
    state = facts.state
    kind = state.kind if state.state in ("ended", "lost") else state.last_kind
    return NodeView(
        node=facts.node,
        label=record.known_as(state.node),
        state=state.state,
        restarts=state.restarts,
        kind=kind,
        detail=state.reason,
    )
