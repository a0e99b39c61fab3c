"""The warm-up, as the cells that wait see it: the first one trains alone, and its values are where they begin."""

from __future__ import annotations

from islandctl.exchange.due import NONE, Due
from islandctl.exchange.follower import Latch
from islandctl.exchange.progress import Progress
from islandctl.exchange.ranks import Ranks


class Warmup:
    """Waits for the seed. It may take hours; the relay may come and go. Collective over the cell's ranks."""

    def __init__(self, progress: Progress, due: Due, ranks: Ranks, latch: Latch) -> None:
        self._progress = progress
        self._due = due
        self._ranks = ranks
        self._latch = latch

    @property
    def waits(self) -> bool:
        """The seed is not here yet. False in the first cell, which makes it."""
        states, is_seed = self._progress.rounds.states, self._progress.schedule.is_seed
        return self._progress.cell != 0 and any(is_seed(state.window + 1) for state in states)

    def go_on(self) -> None:
        """Until the seed is applied, or the first cell has saved at a later step, or ``hurry``."""
        progress = self._progress
        while self.waits:
            stop_at, saved, *seqs = self._ranks.decide(self._news())
            self._ranks.agree(self._latch.error)
            self._due.stop_at = None if stop_at == NONE else stop_at
            if any(seq != NONE for seq in seqs):
                progress.put_forward(progress.schedule.warmup - progress.step)
            elif saved > progress.step:
                progress.put_forward(saved - progress.step)
                break
            elif progress.waiting.hurried():
                break
            for p, seq in enumerate(seqs):
                if seq != NONE:
                    self._due.keep(p, seq)
                    if not progress.resolve(p, seq):
                        return

    def _news(self) -> list[int]:
        """[stop step, step at which the first cell has saved, per fragment the seed's commit]; at most a tick."""
        progress, follower = self._progress, self._progress.follower
        news = [NONE] * (2 + len(progress.rounds.states))
        if self._ranks.rank != 0:
            return news

        def something() -> bool:
            saved = follower.first_saved
            # One that has a round in it is of a later time than the seed, which is on its way here.
            step = NONE if saved is None or any(saved.versions) else saved.step
            news[:] = [self._due.stop_step(), step, *self._seeds()]
            here = step > progress.step or any(seq != NONE for seq in news[2:])
            return here or self._latch.error is not None or progress.waiting.hurry

        progress.waiting.tick(something)
        return news

    def _seeds(self) -> list[int]:
        """The seq of every fragment's seed that is not applied, once all of these are here; else ``NONE``."""
        progress, found = self._progress, [NONE] * len(self._progress.rounds.states)
        for p, state in enumerate(progress.rounds.states):
            if progress.schedule.is_seed(state.window + 1):
                head = progress.follower.next_commit(p)
                if head is None or not progress.preparer.ready(p):
                    return [NONE] * len(found)
                found[p] = head.seq
        return found
