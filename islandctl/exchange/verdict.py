"""What rank 0 decides for one fragment at the end of one step. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from islandctl.exchange.schedule import Schedule
from islandctl.exchange.state import Flight
from islandctl.ledger.entries import Commit


class Verdict(Enum):
    """Of one fragment, now."""

    NOTHING = "nothing"
    RESOLVE = "resolve"
    """Apply the next commit."""
    WAIT = "wait"
    """Stand still: the next commit is due at this step."""


def names(commit: Commit, cell: int) -> bool:
    """Whether the commit counts that cell's packet."""
    return any(part.cell == cell for part in commit.named)


def judge(
    step: int,
    fragment: int,
    flight: Flight | None,
    commit: Commit | None,
    *,
    ready: bool,
    cell: int,
    schedule: Schedule,
    arrival: bool,
    finishing: bool,
    recorded: Callable[[int], int | None],
    patient: Callable[[Flight], bool],
) -> Verdict:
    """Decide.

    Args:
        step: inner steps done.
        fragment: which.
        flight: its round between snapshot and apply, if any.
        commit: its next commit in the ledger, if there.
        ready: everything that the commit names is fetched and computed.
        cell: this cell.
        schedule: the run's.
        arrival: apply as soon as the commit is there, not only at the apply step.
        finishing: after the last step: everything is due, and waited for.
        recorded: the step at which this cell resolved the fragment's round of a window in an earlier life.
        patient: whether to go on waiting for a round that is due now.
    """
    window = flight.window if flight is not None else commit.window if commit is not None else None
    if window is None:
        return Verdict.NOTHING
    if commit is not None and commit.window != window:
        flight = None  # another round comes first: one that this cell did not take part in
        window = commit.window
    past = recorded(window)
    if past is not None:
        if past > step or (flight is None and commit is not None and names(commit, cell)):
            return Verdict.NOTHING
        return Verdict.RESOLVE if ready else Verdict.WAIT
    if flight is None:
        assert commit is not None
        over = schedule.is_final(window) or schedule.snapshot_step(fragment, window) < step or finishing
        # Named without a flight: this cell is repeating steps and has not reached that snapshot again.
        if not over or names(commit, cell):
            return Verdict.NOTHING
        return Verdict.RESOLVE if ready else Verdict.WAIT if finishing else Verdict.NOTHING
    if finishing:
        return Verdict.RESOLVE if ready else Verdict.WAIT
    if step < flight.apply_at:
        return Verdict.RESOLVE if arrival and ready and step > flight.step else Verdict.NOTHING
    if ready:
        return Verdict.RESOLVE
    return Verdict.WAIT if step == flight.apply_at and patient(flight) else Verdict.NOTHING
