"""The way back of a cell that was away while the others went on: through the commits that they made alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from islandctl.exchange.journal import Journal
from islandctl.exchange.progress import Progress
from islandctl.exchange.verdict import names
from islandctl.ledger.entries import Commit

log = logging.getLogger(__name__)


class Walk:
    """Finds the commits that were made without this cell, and takes it past them.

    Args:
        progress: the cell's.
        journal: what it has applied in earlier lives of this attempt.
        attempt: the run's.
    """

    def __init__(self, progress: Progress, journal: Journal, attempt: int) -> None:
        self._progress = progress
        self._journal = journal
        self._attempt = attempt

    def needed(self, head: int) -> bool:
        """Whether the others went on without this cell, as far as entry ``head``."""
        return any(self._without_us(head))

    def left_behind(self) -> int | None:
        """The ledger's head when the others have gone on alone: past this cell's step, or by two rounds and more."""
        head = self._progress.follower.head
        missed = list(self._without_us(head))
        far = any(part.step > self._progress.step for commit in missed for part in commit.named)
        return head if far or len(missed) > len({commit.fragment for commit in missed}) else None

    def _without_us(self, head: int) -> Iterator[Commit]:
        """Commits up to ``head`` that name only others, and that this cell did not apply in an earlier life."""
        for p, queue in enumerate(self._progress.follower.queues):
            for commit in list(queue):
                known = self._journal.step_of(self._attempt, p, commit.window) is not None
                if commit.seq <= head and commit.named and not known and not names(commit, self._progress.cell):
                    yield commit

    def go(self, head: int) -> bool:
        """Apply all commits up to ``head``, whatever they name, and go to the step where the others are. Collective.

        Returns:
            False when ``hurry`` came first; some may be applied.
        """
        progress = self._progress
        if not progress.waiting.everywhere(lambda: progress.follower.head >= head):
            return False
        # In the follower's order every rank has the same commits up to the head.
        todo = sorted(
            ((commit, p) for p, queue in enumerate(progress.follower.queues) for commit in list(queue)),
            key=lambda each: each[0].seq,
        )
        todo = [(commit, p) for commit, p in todo if commit.seq <= head]
        began, missed = progress.step, sum(not names(commit, progress.cell) for commit, _ in todo if commit.named)
        for commit, p in todo:
            if not progress.resolve(p, commit.seq):
                return False
            progress.put_forward(max((part.step for part in commit.named), default=0) - progress.step)
        progress.put_forward(min(progress.first_open_step() - 1, progress.schedule.steps) - progress.step)
        log.warning(
            "rejoined at step %d, from step %d: took over %d rounds, %d of them without this cell. What was sent "
            "counts and is not sent again; what this cell trained and no round counted is dropped",
            *(progress.step, began, len(todo), missed),
        )
        return True
