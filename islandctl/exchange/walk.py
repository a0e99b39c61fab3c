"""The way back of a cell that was away while the others went on: through the commits that they made alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from islandctl.exchange.journal import Journal
from islandctl.exchange.progress import Progress
from islandctl.exchange.ranks import Ranks
from islandctl.ledger.entries import Commit

log = logging.getLogger(__name__)


class Walk:
    """Finds the commits that were made without this cell, and takes it past them.

    Args:
        progress: the cell's.
        journal: what it has applied in earlier lives of this attempt.
        attempt: the run's.
        ranks: the cell's; the first speaks for it.
    """

    def __init__(self, progress: Progress, journal: Journal, attempt: int, ranks: Ranks) -> None:
        self._progress = progress
        self._ranks = ranks
        self._journal = journal
        self._attempt = attempt
        self._counted: int | None = None
        """Rounds that had counted this cell when it had last walked; None: it never has."""

    def needed(self, head: int) -> bool:
        """Whether the others went on without this cell, as far as entry ``head``."""
        return any(self._without_us(head))

    def left_behind(self) -> int | None:
        """The ledger's head when the others have gone on alone: past this cell's step, or by two rounds and more."""
        head = self._progress.follower.head
        missed = list(self._without_us(head))
        far = any(self._progress.rounds.step_of(commit) > self._progress.step for commit in missed)
        return head if far or len(missed) > len({commit.fragment for commit in missed}) else None

    def _without_us(self, head: int) -> Iterator[Commit]:
        """Commits up to ``head`` with which others went on, and that this cell did not apply in an earlier life."""
        for p, queue in enumerate(self._progress.follower.queues):
            for commit in list(queue):
                known = self._journal.step_of(self._attempt, p, commit.window) is not None
                if commit.seq <= head and not known and self._progress.rounds.missed(commit):
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
            key=lambda each: progress.rounds.order(each[0]),
        )
        todo = [(commit, p) for commit, p in todo if commit.seq <= head]
        before_this = progress.rounds.metrics.rounds_applied
        began, missed = progress.step, sum(progress.rounds.missed(commit) for commit, _ in todo)
        dropped = [0] * len(progress.rounds.states)
        for commit, p in todo:
            before = progress.rounds.states[p].tokens
            if not progress.resolve(p, commit.seq):
                return False
            if progress.rounds.missed(commit):
                dropped[p] += before - progress.rounds.states[p].tokens
            progress.put_forward(progress.rounds.step_of(commit) - progress.step)
        progress.put_forward(min(progress.first_open_step() - 1, progress.schedule.steps) - progress.step)
        counted, self._counted = self._counted, progress.rounds.metrics.rounds_applied
        if not self._ranks.leads:
            return True
        if counted == before_this:  # no round has counted it since: the others went on while it walked
            log.info("step %d: the others had gone on; took over %d rounds more", progress.step, len(todo))
            return True
        log.warning(
            "rejoined at step %d, from step %d: took over %d rounds, %d of them without this cell. What was sent "
            "counts and is not sent again; what this cell trained and no round counted is dropped, in its present "
            "life at most %d tokens of a fragment",
            *(progress.step, began, len(todo), missed, max(dropped)),
        )
        return True
