"""One cell's view: pure, no clock and no I/O.

The order of trust: an exit record on the node, then the supervisor's state, then the workers' heartbeat. A worker's
last words say how it ended; whether the cell has ended with it is its supervisor's word alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.runs.record import CellRecord, RunRecord
from islandctl.runs.status import CellState, CellView, Facts, NodeFacts, NodeView

SILENT_AFTER_S = 60.0
"""Heartbeats come every few seconds; a minute without one is worth a word."""


def cell_view(cell: CellRecord, record: RunRecord, facts: Facts) -> CellView:
    """What is known of one cell."""
    nodes = [node for node in facts.nodes if node.cell == cell.index]
    seen = facts.relay.cells[cell.index] if facts.relay and cell.index < len(facts.relay.cells) else None
    beat, age, source = _heartbeat(cell.index, nodes, facts.relay, record.attempt)
    state, detail = _state(record, nodes, beat, age)
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
            "last_end": _last_end(nodes),
            "bytes_up": seen.bytes_up if seen else None,
            "bytes_down": seen.bytes_down if seen else None,
            "source": source,
            "nodes": tuple(_node(cell, node) for node in nodes),
        }
    )


def told_by_relay(relay: RelayStatus | None, cell: int, attempt: int) -> bool:
    """Has the relay figures of the cell in this attempt? Workers that have just come back tell none at first."""
    beat = relay.cells[cell].heartbeat if relay is not None and cell < len(relay.cells) else None
    return beat is not None and beat.attempt == attempt and (beat.step > 0 or bool(beat.bits_per_byte))


def _heartbeat(
    cell: int, nodes: Sequence[NodeFacts], relay: RelayStatus | None, attempt: int
) -> tuple[Heartbeat | None, float | None, str]:
    """The newest word of the cell's workers in this attempt, its age, and where it comes from.

    A word without figures gets those that the cell's file holds, so that bar and curve go on where they were.
    """
    filed = next((node.heartbeat for node in nodes if node.heartbeat and node.heartbeat.attempt == attempt), None)
    seen = relay.cells[cell] if relay is not None and cell < len(relay.cells) else None
    told = seen.heartbeat if seen is not None and seen.heartbeat and seen.heartbeat.attempt == attempt else None
    if told is None or seen is None:
        return filed, None, "none" if filed is None else "files"
    if filed is not None and not told_by_relay(relay, cell, attempt):
        own = {"state": told.state, "life": told.life, "message": told.message or filed.message}
        told = filed.model_copy(update={**own, "tokens_per_s": told.tokens_per_s})
    return told, seen.age_s, "relay"


def _state(
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
        return "restarting", _last_end(nodes)
    if len(known) < len(states) or not states:
        trouble = next((node.trouble for node in nodes if node.state is None), "")
        if beat is not None and age is not None and age < SILENT_AFTER_S:
            said, _ = _word(beat, age)
            return said, f"not reachable from here, but its heartbeat is: {trouble}".rstrip(": ")
        return "unreachable", trouble
    if record.phase == "failed" and all(state.state == "absent" for state in known):
        return "stopped", "was never started"
    if any(state.state == "absent" for state in known):
        return ("launching" if record.phase == "launching" else "lost"), ""
    if beat is None or _of_earlier_life(nodes, beat):
        return ("restarting", _last_end(nodes)) if any(state.restarts for state in known) else ("starting", "")
    return _word(beat, age)


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
    return "lost", "the supervisor is gone without an exit record (reboot or kill -9)"


def _last_end(nodes: Sequence[NodeFacts]) -> str:
    """Why the workers last ended though nobody had asked them to: the first node that knows."""
    return next((node.state.last for node in nodes if node.state is not None and node.state.last), "")


def _node(cell: CellRecord, facts: NodeFacts) -> NodeView:
    label = cell.nodes[facts.node].label
    if facts.state is None:
        return NodeView(node=facts.node, label=label, state="unreachable", detail=facts.trouble)
    detail = facts.state.reason
    return NodeView(
        node=facts.node, label=label, state=facts.state.state, restarts=facts.state.restarts, detail=detail
    )
