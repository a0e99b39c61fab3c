"""A cell's side of the exchange: beside the training loop, and in it only for a moment at snapshot and apply.

The loop calls ``step`` after each inner optimizer step and ``finish`` at the end. Between them the threads of
``Courier`` and ``Follower`` encode, put, fetch and compute; what they find is installed only at the step where it is
due, so that weights and checkpoints never depend on timing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from islandctl.config.recipe import Exchange
from islandctl.errors import CheckpointError, ConfigError, ExchangeError
from islandctl.exchange import state as store
from islandctl.exchange.courier import Courier, Identity
from islandctl.exchange.follower import Follower, Latch
from islandctl.exchange.fragments import fragment_map
from islandctl.exchange.journal import Journal, Resolution
from islandctl.exchange.prepare import Preparer
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.state import Flight
from islandctl.exchange.transport import Transport
from islandctl.exchange.verdict import Verdict, judge, names
from islandctl.ledger.entries import Commit

log = logging.getLogger(__name__)

TICK_S = 1.0
"""While rank 0 waits it tells the others so this often; they would run into the group's timeout otherwise."""
NONE = -1


class Hurried(Exception):
    """The process was asked to end while it waited for the relay, before there was anything to keep."""


class Island:
    """The exchange of one cell, as one of its ranks holds it.

    Args:
        parameters: dotted name → fp32 parameter, plain or a DTensor (FSDP2). All cells begin with equal values.
        settings: the recipe's exchange.
        steps: inner steps of the run.
        seed: of the codecs' random bits.
        run, config_hash, attempt: what packets and ledger entries must be of.
        cell, num_cells: which cell this is, of how many.
        transport: the relay.
        group: gloo group of the cell's ranks; None for a cell of one rank.
        journal: where resolutions are kept (used by rank 0).
        deadline_grace_s: how long over a round's deadline to wait for its commit while the relay does not answer.

    Raises:
        ConfigError: the settings do not fit the model, or ask for a mode that is not two-site.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        settings: Exchange,
        steps: int,
        seed: int,
        run: str,
        config_hash: str,
        attempt: int,
        cell: int,
        num_cells: int,
        transport: Transport,
        group: dist.ProcessGroup | None = None,
        journal: Journal,
        deadline_grace_s: float = 30.0,
    ) -> None:
        if settings.mode != "two-site":
            raise ConfigError(f"exchange.mode: '{settings.mode}' has no shared anchor; only 'two-site' is built")
        if not 0 <= cell < num_cells:
            raise ConfigError(f"cell {cell} of {num_cells} cells")
        self.settings = settings
        self.cell = cell
        self.attempt = attempt
        self.schedule = Schedule(steps, settings.window, settings.fragments, settings.overlap)
        self.map = fragment_map(
            [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
            settings.fragments,
            settings.chunk,
        )
        self._patience_s = settings.late.deadline + deadline_grace_s
        self._journal = journal
        self._ranks = Ranks(group)
        self._shards = Shards(parameters, self._ranks)
        self._step = 0
        self._begun_at = 0  # the step at which this cell last began a round
        self._stop_at: int | None = None
        self._hurry = False
        self._latch = Latch()
        self._courier = Courier(transport, Identity(run, config_hash, attempt, cell, seed), self._latch)
        self._rounds = Rounds(
            settings,
            self.schedule,
            self.map,
            cell=cell,
            ranks=self._ranks,
            shards=self._shards,
            courier=self._courier,
            latch=self._latch,
        )
        self._follower = Follower(
            transport,
            run=run,
            config_hash=config_hash,
            num_fragments=settings.fragments,
            attempt=attempt,
            latch=self._latch,
            on_commit=lambda fragment: self._preparer.begin(fragment),
        )
        self._preparer = Preparer(
            self._rounds.states, self._follower, self._courier, self._latch, settings.outer, self.schedule, cell
        )

    # The loop's calls

    def step(self, tokens: int) -> int:
        """One inner step is done. Collective over the cell's ranks.

        Args:
            tokens: that the whole cell trained in this step.

        Returns:
            The cell's step counter now: one more, or further where it was put forward to meet the other cells.

        Raises:
            ExchangeError: a round cannot be carried out; also what went wrong in the background since the last call.
            DivergenceError: the cells' anchors are not the same.
        """
        self._start()
        self._step += 1
        for state in self._rounds.states:
            state.tokens += tokens
        self._settle()
        self._begin_due()
        return self._step

    def finish(self) -> bool:
        """Apply what is in flight, then exchange every fragment once more: all cells end with the same bits.

        The final rounds are exact averages of what is left (fp32, η = 1, μ = 0), residuals included: nothing is owed
        afterwards. A cell whose step counter ran ahead of its rounds (it trained on without the relay) first makes up
        for them, until all cells are at the end. A final round that nobody's packets came to is begun again under the
        next window number. Collective; blocks until the other cells are there, or the relay's late policy goes on
        without them.

        Returns:
            False when it was broken off, by ``hurry`` or because the others stop before their last step: what is
            done is in the state, and ``finish`` after a resume goes on from there.
        """
        self._start()
        self._settle(finishing=True)
        while not all(state.final for state in self._rounds.states):
            if self._ranks.most([int(self._hurry)]) == [1] or self._others_stop():
                return False
            for p, state in enumerate(self._rounds.states):
                if self._rounds.flights[p] is None and not state.final:
                    number = state.window + 1
                    regular = not state.at_end and number <= self.schedule.last_window(p)
                    self._rounds.begin(p, number if regular else max(self.schedule.final_window, number), self._step)
            self._settle(finishing=True)
        self._rounds.take_anchors()
        return True

    def should_stop_at(self) -> int | None:
        """The step at which all cells checkpoint and end because of a stop entry; None: go on. Equal on all ranks."""
        return self._stop_at

    def hurry(self) -> None:
        """Do not stand still any more: a round that is due stays in flight, and comes with the checkpoint.

        For a process that was asked to end. Any thread or signal handler of any rank may call it; a wait ends within
        ``TICK_S``.
        """
        self._hurry = True

    def versions(self) -> tuple[int, ...]:
        """Of every fragment, the commits that its anchor contains."""
        return tuple(state.version for state in self._rounds.states)

    def metrics(self) -> dict[str, Any]:
        """Counts and the last round's figures of each fragment; see ``Metrics``. Bytes are this rank's."""
        self._rounds.metrics.bytes_up = self._courier.bytes_up
        self._rounds.metrics.bytes_down = self._courier.bytes_down
        return self._rounds.metrics.as_dict()

    def close(self) -> None:
        """End all threads. Packets that are not put yet are in the checkpoint, or come again with the replay."""
        self._latch.fail(ExchangeError("the exchange was closed"))  # wakes a loop that still waits in another thread
        self._latch.closed.set()
        self._follower.join()
        self._courier.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the state: see ``state`` for the keys. Does not wait for the network."""
        meta = {
            "step": self._step,
            "begun_at": self._begun_at,
            "cell": self.cell,
            "ranks": self._ranks.size,
            "map_hash": self.map.map_hash,
            "metrics": self._rounds.metrics.counters(),
        }
        return store.save(self._rounds.states, self._rounds.flights, meta, self._ranks.rank)

    def needs(self, key: str) -> bool:
        """Whether ``load_state_dict`` on this rank wants this key of a checkpoint."""
        kind, *rest = key.split(".")
        if kind == "meta" or (kind == "flight" and rest[1] == "snapshot"):
            return key.endswith(f".rank{self._ranks.rank}")
        p, c = int(rest[0]), int(rest[-1])
        return p < len(self._rounds.states) and c in self._rounds.states[p].anchor

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave on this rank, before ``resume`` or the first ``step``.

        The parameters themselves are loaded by the caller.

        Raises:
            CheckpointError: it belongs to another model, cell or number of ranks, or something is missing.
        """
        meta = store.load_meta(tensors, self._ranks.rank)
        mine = {"cell": self.cell, "ranks": self._ranks.size, "map_hash": self.map.map_hash}
        for name, value in mine.items():
            if meta.get(name) != value:
                raise CheckpointError(
                    f"rank {self._ranks.rank}: the checkpoint's exchange state has {name} {meta.get(name)}, "
                    f"not {value}"
                )
        parts = [{one.name: self._shards.local(one.name) for one in each.placements} for each in self.map.fragments]
        try:
            self._rounds.flights = store.load(tensors, meta, self._rounds.states, parts, self._ranks.rank)
            self._step, self._begun_at = meta["step"], meta["begun_at"]
            self._rounds.metrics.restore(meta["metrics"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"rank {self._ranks.rank}: the checkpoint's exchange state is damaged") from error

    def resume(self) -> int:
        """Find the way back: call once at every start, after loading whatever there is to load. Collective.

        Reads the ledger to its end (waiting for the relay if need be) and puts packets in flight again. When commits
        since the checkpoint were made without this cell it walks them, otherwise the caller repeats its steps. What
        was due at the checkpoint's own step, and was left undone because the process had to end, is done now.

        Returns:
            The step to go on from: the loaded one, or after a walk the one before the first open round.

        Raises:
            Hurried: asked to end while the relay did not answer.
        """
        self._start()
        if not self._everywhere(lambda: self._follower.caught_up):
            raise Hurried
        (head,) = self._ranks.decide([self._follower.head])
        (walk,) = self._ranks.decide([int(any(self._without_us(head)))])
        if walk and not self._walk(head):
            raise Hurried
        self._rounds.put_again()
        if self._step < self.schedule.steps:
            self._settle()
            self._begin_due()
        return self._step

    def _without_us(self, head: int) -> Iterator[Commit]:
        """Commits up to ``head`` that name only others, and that this cell did not apply in an earlier life."""
        for p, queue in enumerate(self._follower.queues):
            for commit in list(queue):
                known = self._journal.step_of(self.attempt, p, commit.window) is not None
                if commit.seq <= head and commit.named and not known and not names(commit, self.cell):
                    yield commit

    def _left_behind(self) -> int:
        """The ledger's head when the others have gone on alone, past this cell's step; else ``NONE``."""
        head = self._follower.head
        far = any(part.step > self._step for commit in self._without_us(head) for part in commit.named)
        return head if far else NONE

    def _walk(self, head: int) -> bool:
        """Apply all commits up to ``head``, whatever they name, and go to the step where the others are.

        Returns:
            False when ``hurry`` came first; some may be applied.
        """
        if not self._everywhere(lambda: self._follower.head >= head):
            return False
        # In the follower's order every rank has the same commits up to the head.
        todo = sorted(
            (commit.seq, p, max((part.step for part in commit.named), default=0))
            for p, queue in enumerate(self._follower.queues)
            for commit in list(queue)
            if commit.seq <= head
        )
        log.info("walking %d commits that the ledger has beyond step %d", len(todo), self._step)
        for seq, p, step in todo:
            if not self._resolve(p, seq):
                return False
            self._put_forward(step - self._step)
        self._put_forward(min(self._first_open_step() - 1, self.schedule.steps) - self._step)
        return True

    def _put_forward(self, num_steps: int) -> None:
        """Skip steps: the counter, and what is in flight with it."""
        if num_steps <= 0:
            return
        end = self.schedule.steps
        self._step = min(self._step + num_steps, end)
        for flight in self._rounds.flights:
            if flight is not None:
                flight.moved += num_steps
                flight.apply_at = min(flight.apply_at + num_steps, end)

    def _first_open_step(self) -> int:
        steps = []
        for p, (state, flight) in enumerate(zip(self._rounds.states, self._rounds.flights, strict=True)):
            if flight is not None:
                steps.append(flight.apply_at)
            elif self.schedule.is_final(state.window + 1):
                steps.append(self.schedule.steps + 1)
            else:
                steps.append(self.schedule.snapshot_step(p, state.window + 1))
        return min(steps)

    def _start(self) -> None:
        self._follower.start([state.resolved_seq for state in self._rounds.states])

    # What is due

    def _begin_due(self) -> None:
        """At a step of the schedule, begin the next round in the order of all rounds: by window, then fragment.

        As a rule that is the schedule's own round. A cell that trained on without the relay is behind in its rounds;
        it takes up where it left off. Since all cells begin rounds in one order, and never leave one out, a cell
        never waits for a round that another one will begin only after a round which waits for the first.
        """
        due = self.schedule.begins_at(self._step)
        if due is None or self._begun_at == self._step:
            return
        rounds = []
        for p, state in enumerate(self._rounds.states):
            flight = self._rounds.flights[p]
            window = (state.window if flight is None else max(state.window, flight.window)) + 1
            if not state.at_end and window <= self.schedule.last_window(p):
                rounds.append((window, p, flight is None))
        window, p, free = min(rounds, default=(0, 0, False))
        if free and (window, p) <= (due.window, due.fragment):
            self._begun_at = self._step
            self._rounds.begin(p, window, self._step)
            if self.schedule.overlap == 0:
                self._settle()

    def _settle(self, *, finishing: bool = False) -> None:
        """Apply what is due. Rank 0 decides; all ranks do the same in the same order, or fail together."""
        while True:
            waiting, stop_at, walk, *seqs = self._ranks.decide(self._plan(finishing))
            self._ranks.agree(self._latch.error)
            self._stop_at = None if stop_at == NONE else stop_at
            if walk != NONE:
                if not self._walk(walk):
                    return
                continue
            for p, seq in enumerate(seqs):
                if seq != NONE:
                    self._journal_resolution(p)
                    if not self._resolve(p, seq):
                        return
            if all(seq == NONE for seq in seqs):
                if not waiting:
                    return
                self._hurry = self._ranks.most([int(self._hurry)]) == [1]

    def _plan(self, finishing: bool) -> list[int]:
        """[still waiting, stop step, walk to this entry, per fragment the commit to apply now]; at most a tick."""
        width = 3 + len(self._rounds.states)
        if self._ranks.rank != 0:
            return [0] * width
        plan = [0] * width

        def settled() -> bool:
            verdicts = [self._judge(p, finishing) for p in range(len(self._rounds.states))]
            heads = [self._follower.next_commit(p) for p in range(len(self._rounds.states))]
            seqs = [
                head.seq if verdict is Verdict.RESOLVE and head is not None else NONE
                for verdict, head in zip(verdicts, heads, strict=True)
            ]
            stop_at, walk = self._stop_step(), NONE if finishing else self._left_behind()
            waiting = Verdict.WAIT in verdicts and not self._hurry
            waiting = waiting and not (finishing and NONE < stop_at < self.schedule.steps)
            plan[:] = [int(waiting), stop_at, walk, *seqs]
            return not waiting or walk != NONE or any(seq != NONE for seq in seqs) or self._latch.error is not None

        began = time.monotonic()
        with self._latch.changed:
            self._latch.changed.wait_for(settled, timeout=TICK_S)
        self._rounds.metrics.wait_s += time.monotonic() - began
        return plan

    def _judge(self, p: int, finishing: bool) -> Verdict:
        return judge(
            self._step,
            p,
            self._rounds.flights[p],
            self._follower.next_commit(p),
            ready=self._preparer.ready(p),
            cell=self.cell,
            schedule=self.schedule,
            arrival=self.settings.when == "arrival",
            finishing=finishing,
            recorded=lambda window: self._journal.step_of(self.attempt, p, window),
            patient=self._patient,
        )

    def _patient(self, flight: Flight) -> bool:
        """While the relay answers, its late policy decides how long a round stays open; without it, the deadline.

        So too once the run stops: cells that are further may have ended already, and would be waited for in vain.
        """
        in_time = time.monotonic() < flight.started + self._patience_s
        return in_time or (self._follower.in_touch and self._follower.stop_round is None)

    def _stop_step(self) -> int:
        commit = self._follower.stop_round
        if commit is None:
            return NONE
        if not commit.named:
            return self.schedule.apply_step(commit.fragment, commit.window)
        return min(max(part.step for part in commit.named) + self.schedule.overlap, self.schedule.steps)

    def _others_stop(self) -> bool:
        """While this cell has trained its last step, the others end before theirs."""
        return self._stop_at is not None and self._stop_at < self.schedule.steps

    def _journal_resolution(self, p: int) -> None:
        commit = self._follower.next_commit(p)
        if self._ranks.rank == 0 and commit is not None:
            self._journal.append(
                Resolution(attempt=self.attempt, fragment=p, window=commit.window, seq=commit.seq, step=self._step)
            )

    def _everywhere(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds on every rank. False: ``hurry`` came first. Collective."""
        while True:
            with self._latch.changed:
                self._latch.changed.wait_for(lambda: condition() or self._latch.error is not None, timeout=TICK_S)
            self._ranks.agree(self._latch.error)
            missing, hurry = self._ranks.most([int(not condition()), int(self._hurry)])
            if not missing:
                return True
            if hurry:
                self._hurry = True
                return False

    def _resolve(self, p: int, seq: int) -> bool:
        """Apply the fragment's next commit, when all ranks have it. False: ``hurry`` came first."""

        def here() -> bool:
            head = self._follower.next_commit(p)
            return head is not None and head.seq == seq and self._preparer.ready(p)

        if not self._everywhere(here):
            return False
        commit, flight = self._follower.next_commit(p), self._rounds.flights[p]
        assert commit is not None
        self._rounds.resolve(p, commit, self._preparer.take(p), self._step)
        self._preparer.next(p)
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
            self._put_forward(furthest - flight.step - flight.moved)
