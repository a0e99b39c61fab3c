"""At which step all cells can stop together, though none may have passed it when it hears so. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from islandctl.exchange.schedule import Round, Schedule
from islandctl.ledger.entries import Commit
from islandctl.ledger.pairs import Pairing


def common_step(
    commit: Commit, schedule: Schedule, pairing: Pairing | None, *, arrival: bool, unequal: bool = False
) -> int:
    """The step at which the run stops, by the first commit after the stop entry.

    With one anchor nobody passes that round's apply step without having read its commit. In a butterfly others may be
    ahead of the commit's pair, by what ``reached`` allows; they hear of it with their own next round at the latest.
    With ``when: arrival`` a round can be applied before its step, and only one that began after the stop was known
    waits for the stop: so one overlap later. Cells of unequal pace are at one step only where a snapshot is due: at
    the next of these.

    Args:
        pairing: of a butterfly.
        arrival: rounds are applied as soon as their commit is there.
        unequal: cells take steps of their own.
    """
    nominal = schedule.snapshot_step(commit.fragment, commit.window)
    begun = max((part.step for part in commit.named), default=nominal)
    apply_at = begun + schedule.overlap
    if pairing is not None:
        # Cells whose counters were put forward are that much behind the schedule's rounds.
        furthest = _furthest(nominal + schedule.overlap, schedule, pairing)
        after = next(_snapshots(schedule, furthest), schedule.steps)
        apply_at = after + schedule.overlap + max(0, begun - nominal)
    apply_at += schedule.overlap if arrival else 0
    if unequal:
        apply_at = next(_snapshots(schedule, apply_at - 1), schedule.steps)
    return min(apply_at, schedule.steps)


def reached(step: int, schedule: Schedule, pairing: Pairing) -> list[int]:
    """Where the others are at least, when one cell has done ``step`` steps and no round was skipped.

    Who has applied a round knows that its partner has taken the snapshot, and by then had applied all rounds that
    were due there: and so on, from partner to partner.

    Returns:
        By the exclusive or of the two cells' numbers, the steps that the other has surely done.
    """
    found = [0] * pairing.num_cells
    found[0] = step
    changed = True
    while changed:
        changed = False
        for mask, known in enumerate(found):
            seen = set()
            for each in _applied(known, schedule):
                bit = pairing.bit(each.fragment, each.window)
                if bit in seen:
                    continue
                seen.add(bit)
                other, at_least = mask ^ (1 << bit), schedule.snapshot_step(each.fragment, each.window)
                if found[other] < at_least:
                    found[other], changed = at_least, True
                if len(seen) == pairing.num_bits:
                    break
    return found


def _furthest(step: int, schedule: Schedule, pairing: Pairing) -> int:
    """The furthest that a cell can be while some other has done no more than ``step`` steps."""
    for snapshot in _snapshots(schedule, step - schedule.overlap):
        applied = snapshot + schedule.overlap
        if min(reached(applied, schedule, pairing)) > step:
            return applied - 1
    return schedule.steps


def _snapshots(schedule: Schedule, after: int) -> Iterator[int]:
    """The steps beyond ``after`` at which rounds begin, in order."""
    return (step for step in range(max(after, 0) + 1, schedule.steps + 1) if schedule.begins_at(step) is not None)


def _applied(step: int, schedule: Schedule) -> Iterator[Round]:
    """The rounds that a cell has applied after ``step`` steps, the latest first."""
    for at in range(min(step - schedule.overlap, schedule.steps), 0, -1):
        each = schedule.begins_at(at)
        if each is not None:
            yield each
