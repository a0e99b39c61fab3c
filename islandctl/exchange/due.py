"""What is due at a step: rounds that begin, and rounds that end. Rank 0 decides, all ranks do the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from islandctl.config.exchange import Exchange
from islandctl.exchange.follower import Latch
from islandctl.exchange.journal import Journal, Resolution
from islandctl.exchange.progress import Progress
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.state import Flight
from islandctl.exchange.stopping import common_step
from islandctl.exchange.verdict import Verdict, judge
from islandctl.exchange.walk import Walk
from islandctl.ledger.entries import Commit
from islandctl.ledger.pairs import Pairing

log = logging.getLogger(__name__)
NONE = -1


class Due:
    """Begins and ends rounds when it is time. Collective over the cell's ranks.

    Args:
        settings: the recipe's exchange.
        patience_s: how long a round is waited for at most, when the relay does not decide it.
        attempt: the run's.
        progress, walk, ranks, latch: the cell's.
        journal: gets every resolution before it is applied; used by rank 0.
        pairing: of a butterfly.
        save_every: steps between joint checkpoints.
        on_silence: called once a wait, when the relay does not answer.
    """

    def __init__(
        self,
        settings: Exchange,
        patience_s: float,
        attempt: int,
        *,
        progress: Progress,
        walk: Walk,
        ranks: Ranks,
        latch: Latch,
        journal: Journal,
        pairing: Pairing | None,
        save_every: int,
        on_silence: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._arrival = settings.when == "arrival"
        self._pairing = pairing
        self._save_every = save_every
        self._stop_known: int | None = None
        self._stop_after: int | None = None
        self._patience_s = patience_s
        self._attempt = attempt
        self._progress = progress
        self._walk = walk
        self._schedule = progress.schedule
        self._rounds = progress.rounds
        self._follower = progress.follower
        self._waiting = progress.waiting
        self._ranks = ranks
        self._latch = latch
        self._journal = journal
        self._on_silence = on_silence
        self.stop_at: int | None = None
        """The step at which all cells checkpoint and end; None: go on. Equal on all ranks."""

    def begin(self) -> None:
        """At a step of the schedule, begin the next round in the order of all rounds: by window, then fragment.

        As a rule that is the schedule's own round. A cell that trained on without the relay is behind in its rounds;
        it takes up where it left off. Since all cells begin rounds in one order, and never leave one out, a cell
        never waits for a round that another one will begin only after a round which waits for the first.
        """
        step = self._progress.step
        if self._schedule.seeds_at(step) and self._progress.cell == 0:
            self._begin_seed()
            return
        due = self._schedule.begins_at(step)
        if due is None or self._progress.begun_at == step:
            return
        rounds = []
        for p, state in enumerate(self._rounds.states):
            flight = self._rounds.flights[p]
            window = (state.window if flight is None else max(state.window, flight.window)) + 1
            if not state.at_end and window <= self._schedule.last_window(p):
                rounds.append((window, p, flight is None))
        window, p, free = min(rounds, default=(0, 0, False))
        if free and (window, p) <= (due.window, due.fragment):
            self._progress.begun_at = step
            self._rounds.begin(p, window, step)
            if self._schedule.overlap == 0:
                self.settle()

    def _begin_seed(self) -> None:
        """The first cell gives its values to the others, and goes on when the relay has all of them."""
        for p, state in enumerate(self._rounds.states):
            if self._schedule.is_seed(state.window + 1) and self._rounds.flights[p] is None:
                self._rounds.begin(p, state.window + 1, self._progress.step)
        self.settle()

    def begin_last(self) -> None:
        """After the last step: the fragments' next rounds, which make up for missed ones or are final ones."""
        for p, window in self._rounds.next_last():
            self._rounds.begin(p, window, self._progress.step)

    def settle(self, *, finishing: bool = False) -> None:
        """Apply what is due, after waiting for it. All ranks do the same in the same order, or fail together."""
        told = False
        while True:
            waiting, stop_at, walk, *seqs = self._ranks.decide(self._plan(finishing))
            self._ranks.agree(self._latch.error)
            self.stop_at = None if stop_at == NONE else stop_at
            if walk != NONE:
                if not self._walk.go(walk):
                    return
                continue
            for p, seq in enumerate(seqs):
                if seq != NONE:
                    self.keep(p, seq)
                    if not self._progress.resolve(p, seq):
                        return
            if all(seq == NONE for seq in seqs):
                if not waiting:
                    return
                self._waiting.hurried()
                if not told and not self._follower.in_touch:
                    told = True
                    self._tell()

    def others_stop(self) -> bool:
        """While this cell has trained its last step, the others end before theirs."""
        return self.stop_at is not None and self.stop_at < self._schedule.steps

    def _plan(self, finishing: bool) -> list[int]:
        """[still waiting, stop step, walk to this entry, per fragment the commit to apply now]; at most a tick."""
        plan = [0] * (3 + len(self._rounds.states))
        if self._ranks.rank != 0:
            return plan

        def settled() -> bool:
            verdicts = [self._judge(p, finishing) for p in range(len(self._rounds.states))]
            heads = [self._next(p) for p in range(len(self._rounds.states))]
            seqs = [
                head.seq if verdict is Verdict.RESOLVE and head is not None else NONE
                for verdict, head in zip(verdicts, heads, strict=True)
            ]
            stop_at, behind = self.stop_step(), None if finishing else self._walk.left_behind()
            waiting = Verdict.WAIT in verdicts and not self._waiting.hurry
            waiting = waiting and not (finishing and NONE < stop_at < self._schedule.steps)
            plan[:] = [int(waiting), stop_at, NONE if behind is None else behind, *seqs]
            done = not waiting or behind is not None or any(seq != NONE for seq in seqs)
            return done or self._latch.error is not None

        began = time.monotonic()
        self._waiting.tick(settled)
        self._rounds.metrics.wait_s += time.monotonic() - began
        return plan

    def _next(self, p: int) -> Commit | None:
        """The commit that this cell takes next. Rank 0 only; what comes too late to matter is laid aside."""
        while (head := self._follower.next_commit(p)) is not None and self._rounds.outdated(p, head):
            self._progress.preparer.next(p)
        return self._rounds.comes_next(p, head)

    def _judge(self, p: int, finishing: bool) -> Verdict:
        return judge(
            self._progress.step,
            p,
            self._rounds.flights[p],
            self._next(p),
            ready=self._progress.preparer.ready(p),
            cell=self._progress.cell,
            schedule=self._schedule,
            arrival=self._may_arrive(p),
            finishing=finishing,
            recorded=lambda window: self._recorded(p, window),
            patient=self._patient,
        )

    def _may_arrive(self, p: int) -> bool:
        """Whether the round in flight may be applied at this step already, before its time.

        Not while a step lies ahead of it at which all cells save: there it is in flight in all of them, or in none.
        """
        flight, step = self._rounds.flights[p], self._progress.step
        if not self._arrival or flight is None:
            return False
        saves = [-(-step // self._save_every) * self._save_every, self.stop_step()]
        return not any(step <= save < flight.apply_at for save in saves)

    def _recorded(self, p: int, window: int) -> int | None:
        """The step at which an earlier life resolved the round. After a resume, that of the attempt before.

        The latter only for ``arrival``, and where it lies in the round's time: else the ledger tells as much.
        """
        step, flight = self._journal.step_of(self._attempt, p, window), self._rounds.flights[p]
        if step is None and self._arrival and flight is not None and flight.window == window:
            before = self._journal.step_before(self._attempt, p, window)
            step = before if before is not None and flight.step < before <= flight.apply_at else None
        return step

    def _patient(self, flight: Flight) -> bool:
        """While the relay answers, its late policy decides how long a round is open; else ``late.relay_away``.

        The seed is waited for as long as it takes: nobody can train before it is there.
        Once the run stops the deadline does: cells that are further may have ended already, and would be waited for
        in vain.
        """
        now, follower = time.monotonic(), self._follower
        if self._schedule.is_seed(flight.window):
            return True
        if follower.in_touch:
            return follower.stop_round is None or now < flight.started + self._patience_s
        return now < min(flight.started + self._patience_s, follower.silent_since + self._settings.late.relay_away)

    def _tell(self) -> None:
        """Say that the loop stands still, and why."""
        if self._ranks.leads:
            log.warning("step %d: standing still, since the relay does not answer", self._progress.step)
        self._on_silence()

    def stop_step(self) -> int:
        """The step at which all cells end; ``NONE``: none, or not known yet. Rank 0 only."""
        commit = self._follower.stop_round
        if commit is None:
            return self._stop_in_warmup()
        if self._stop_known is None:
            unequal = self._settings.pace == "measured"
            self._stop_known = common_step(
                commit, self._schedule, self._pairing, arrival=self._arrival, unequal=unequal
            )
        return self._stop_known

    def _stop_in_warmup(self) -> int:
        """No commit comes for long: the first cell ends after its next step, the others where it has saved."""
        step, follower = self._progress.step, self._follower
        if not follower.stopping or step >= self._schedule.warmup:
            return NONE
        heads = (follower.next_commit(p) for p in range(len(self._rounds.states)))
        if any(head is not None and self._schedule.is_seed(head.window) for head in heads):
            return NONE  # the seed is older than the stop: others have gone on from there
        if follower.stop_saved is not None:
            return follower.stop_saved.step
        if self._progress.cell != 0:
            return NONE
        if self._stop_after is None:
            self._stop_after = step + 1
        return self._stop_after

    def keep(self, p: int, seq: int) -> None:
        """Into the journal: the commit, which is entry ``seq``, is applied at this step."""
        if self._ranks.rank != 0 or not self._follower.bring(p, seq):
            return
        commit = self._follower.next_commit(p)
        if commit is not None:
            self._journal.append(
                Resolution(
                    attempt=self._attempt, fragment=p, window=commit.window, seq=commit.seq, step=self._progress.step
                )
            )
