"""Where a cell stands in the run: its step, and how a fragment's next commit is applied there."""

from __future__ import annotations

from typing import Any

from islandctl.exchange.follower import Follower
from islandctl.exchange.prepare import Preparer
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.state import Flight
from islandctl.exchange.verdict import names
from islandctl.exchange.waiting import Waiting
from islandctl.ledger.entries import Commit


class Progress:
    """The cell's step counter and its rounds, moved together. Collective over the cell's ranks."""

    def __init__(
        self,
        cell: int,
        schedule: Schedule,
        rounds: Rounds[Any, Any],
        follower: Follower,
        preparer: Preparer[Any],
        waiting: Waiting,
    ) -> None:
        self.cell = cell
        self.schedule = schedule
        self.rounds = rounds
        self.follower = follower
        self.preparer = preparer
        self.waiting = waiting
        self.step = 0
        """The run's steps that are behind this cell, done or skipped."""
        self.begun_at = 0
        """The step at which this cell last began a round."""

    def resolve(self, p: int, seq: int) -> bool:
        """Apply the fragment's next commit, which is entry ``seq``, when all ranks have it. False: ``hurry``."""

        def here() -> bool:
            return self.follower.bring(p, seq) and self.preparer.ready(p)

        if not self.waiting.everywhere(here):
            return False
        commit, flight = self.follower.next_commit(p), self.rounds.flights[p]
        assert commit is not None
        self.rounds.resolve(p, commit, self.preparer.take(p), self.step)
        usual = not self.schedule.is_whole(commit.window)
        if usual and commit.named and flight is not None and flight.window == commit.window:
            self.rounds.metrics.round_s[p] = round(self.preparer.done_at[p] - flight.started, 4)
        self.preparer.next(p)
        if flight is not None and flight.window == commit.window and names(commit, self.cell):
            self._meet(commit, flight)
        return True

    def _meet(self, commit: Commit, flight: Flight) -> None:
        """The same round at unequal steps: cells have trained on without the relay, some more than others.

        Those with fewer steps skip the difference, so that all have the same step in the same round again, and equal
        versions at equal steps: checkpoints can be joint. Cells that wait at the end of the run move nobody.
        """
        if flight.step < self.schedule.steps:
            furthest = max(part.step for part in commit.named if part.step < self.schedule.steps)
            self.put_forward(furthest - flight.step - flight.moved)

    def put_forward(self, num_steps: int) -> None:
        """Skip steps: the counter, and what is in flight with it."""
        if num_steps <= 0:
            return
        end = self.schedule.steps
        self.step = min(self.step + num_steps, end)
        for flight in self.rounds.flights:
            if flight is not None:
                flight.moved += num_steps
                flight.apply_at = min(flight.apply_at + num_steps, end)

    def first_open_step(self) -> int:
        """The first step at which a round of this cell begins or is due."""
        steps = []
        for p, (state, flight) in enumerate(zip(self.rounds.states, self.rounds.flights, strict=True)):
            if flight is not None:
                steps.append(flight.apply_at)
            elif self.schedule.is_final(state.window + 1):
                steps.append(self.schedule.steps + 1)
            else:
                steps.append(self.schedule.snapshot_step(p, state.window + 1))
        return min(steps)
