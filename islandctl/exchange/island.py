"""A cell's side of the exchange: beside the training loop, and in it only for a moment at snapshot and apply.

The loop calls ``step`` after each inner optimizer step and ``finish`` at the end. Between them the threads of
``Courier`` and ``Follower`` encode, put, fetch and compute; what they find is installed only at the step where it is
due, so that weights and checkpoints never depend on timing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
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

log = logging.getLogger(__name__)

TICK_S = 1.0
"""While rank 0 waits it tells the others so this often; they would run into the group's timeout otherwise."""
NONE = -1


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

    def step(self, tokens: int) -> None:
        """One inner step is done. Collective over the cell's ranks.

        Args:
            tokens: that the whole cell trained in this step.

        Raises:
            ExchangeError: a round cannot be carried out; also what went wrong in the background since the last call.
            DivergenceError: the cells' anchors are not the same.
        """
        self._start()
        self._step += 1
        for state in self._rounds.states:
            state.tokens += tokens
        self._settle()
        due = self.schedule.begins_at(self._step)
        if due is not None and self._open(due.fragment, due.window) and self.schedule.overlap == 0:
            self._settle()

    def finish(self) -> None:
        """Apply what is in flight, then exchange every fragment once more: all cells end with the same bits.

        The final rounds are exact averages of what is left (fp32, η = 1, μ = 0), residuals included: nothing is owed
        afterwards. A cell whose step counter ran ahead of its rounds (it trained on without the relay) first makes up
        for them. A final round that nobody's packets came to is begun again under the next window number.
        Collective; blocks until the other cells are there, or the relay's late policy goes on without them.
        """
        self._start()
        self._settle(finishing=True)
        while not all(state.final for state in self._rounds.states):
            for p, state in enumerate(self._rounds.states):
                last = self.schedule.last_window(p)
                if not state.final:
                    # Regular rounds left undone (steps without the relay): the other cells still wait for them.
                    self._open(p, last if state.window < last else max(self.schedule.final_window, state.window + 1))
            self._settle(finishing=True)
        self._rounds.take_anchors()

    def should_stop_at(self) -> int | None:
        """The step at which all cells checkpoint and end because of a stop entry; None: go on. Equal on all ranks."""
        return self._stop_at

    def hurry(self) -> None:
        """Do not stand still in ``step`` any more: a round that is due stays in flight, and comes with the
        checkpoint. For a process that was asked to end; any thread or signal handler of rank 0 may call it."""
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
        self._latch.closed.set()
        self._latch.fail(ExchangeError("the exchange was closed"))  # wakes a loop that still waits in another thread
        self._follower.join()
        self._courier.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the state: see ``state`` for the keys. Does not wait for the network."""
        meta = {
            "step": self._step,
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
            self._step = meta["step"]
            self._rounds.metrics.restore(meta["metrics"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"rank {self._ranks.rank}: the checkpoint's exchange state is damaged") from error

    def resume(self) -> int:
        """Find the way back: call once at every start, after loading whatever there is to load. Collective.

        Reads the ledger to its end (waiting for the relay if need be) and puts packets in flight again. When commits
        since the checkpoint were made without this cell it walks them, otherwise the caller repeats its steps.

        Returns:
            The step to go on from: the loaded one, or after a walk the one before the first open round.
        """
        self._start()
        self._await(lambda: self._follower.caught_up)
        self._ranks.agree(self._latch.error)
        (head,) = self._ranks.decide([self._follower.head])
        self._await(lambda: self._follower.head >= head)
        self._ranks.agree(self._latch.error)
        # In the follower's order every rank has the same commits up to the head.
        todo = sorted(
            (commit.seq, p)
            for p, queue in enumerate(self._follower.queues)
            for commit in list(queue)
            if commit.seq <= head
        )
        (walk,) = self._ranks.decide([int(self._was_left_behind(head))])
        if walk:
            log.info("walking %d commits made since the checkpoint of step %d", len(todo), self._step)
            for seq, p in todo:
                self._resolve(p, seq)
            self._step = max(self._step, min(self._first_open_step() - 1, self.schedule.steps))
        self._rounds.put_again()
        return self._step

    def _was_left_behind(self, head: int) -> bool:
        """Has the ledger commits without this cell that it did not apply in its earlier life either?"""
        return any(
            commit.seq <= head
            and bool(commit.named)
            and not names(commit, self.cell)
            and self._journal.step_of(self.attempt, p, commit.window) is None
            for p, queue in enumerate(self._follower.queues)
            for commit in list(queue)
        )

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

    def _open(self, p: int, window: int) -> bool:
        """Begin the fragment's next round unless one is open; ``window`` is the schedule's number for it.

        The number taken is the one after the last resolved round's, so that cells whose step counters have drifted
        apart (one trained on without the relay) meet in the same round.
        """
        state = self._rounds.states[p]
        number = window if self.schedule.is_final(window) else state.window + 1
        head = self._follower.next_commit(p)
        if head is not None and head.window <= window:
            number = head.window  # decided already: this cell repeats its steps
        if self._rounds.flights[p] is not None or state.final or number > window:
            number = NONE
        (number,) = self._ranks.decide([number])
        if number == NONE:
            return False
        self._rounds.begin(p, number, self._step)
        return True

    def _settle(self, *, finishing: bool = False) -> None:
        """Apply what is due. Rank 0 decides; all ranks do the same in the same order, or fail together."""
        while True:
            waiting, stop_at, *seqs = self._ranks.decide(self._plan(finishing))
            self._ranks.agree(self._latch.error)
            self._stop_at = None if stop_at == NONE else stop_at
            for p, seq in enumerate(seqs):
                if seq != NONE:
                    self._journal_resolution(p)
                    self._resolve(p, seq)
            if not waiting and all(seq == NONE for seq in seqs):
                return

    def _plan(self, finishing: bool) -> list[int]:
        """[still waiting, stop step, per fragment the commit to apply now]; waits at most a tick."""
        width = 2 + len(self._rounds.states)
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
            waiting = Verdict.WAIT in verdicts
            plan[:] = [int(waiting), self._stop_step(), *seqs]
            return not waiting or any(seq != NONE for seq in seqs) or self._latch.error is not None

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
        """While the relay answers, its late policy decides how long a round stays open; without it, the deadline."""
        in_time = time.monotonic() < flight.started + self._patience_s
        return not self._hurry and (self._follower.in_touch or in_time)

    def _stop_step(self) -> int:
        commit = self._follower.stop_round
        return NONE if commit is None else self.schedule.apply_step(commit.fragment, commit.window)

    def _journal_resolution(self, p: int) -> None:
        commit = self._follower.next_commit(p)
        if self._ranks.rank == 0 and commit is not None:
            self._journal.append(
                Resolution(attempt=self.attempt, fragment=p, window=commit.window, seq=commit.seq, step=self._step)
            )

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds or the background has failed."""
        with self._latch.changed:
            self._latch.changed.wait_for(lambda: condition() or self._latch.error is not None)

    def _resolve(self, p: int, seq: int) -> None:
        """Apply the fragment's next commit, when this rank has it too."""

        def here() -> bool:
            head = self._follower.next_commit(p)
            return head is not None and head.seq == seq and self._preparer.ready(p)

        self._await(here)
        self._ranks.agree(self._latch.error)
        commit = self._follower.next_commit(p)
        assert commit is not None
        self._rounds.resolve(p, commit, self._preparer.take(p), self._step)
        self._preparer.next(p)
