"""A cell's side of the exchange: beside the training loop, and in it only for a moment at snapshot and apply.

The loop calls ``step`` after each inner optimizer step and ``finish`` at the end. Between them the threads of
``Courier`` and ``Follower`` encode, put, fetch and compute; what they find is installed only at the step where it is
due, so that weights and checkpoints never depend on timing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from islandctl.config.recipe import Exchange
from islandctl.errors import CheckpointError, ConfigError, DivergenceError, ExchangeError, IslandError
from islandctl.exchange import state as store
from islandctl.exchange.codecs import Codec, codec_named
from islandctl.exchange.courier import Assignment, Courier, Identity
from islandctl.exchange.follower import Follower, Latch
from islandctl.exchange.fragments import Chunk, fragment_map
from islandctl.exchange.journal import Journal, Resolution
from islandctl.exchange.metrics import Metrics
from islandctl.exchange.prepare import Prepared, Preparer
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.state import Flight, FragmentState
from islandctl.exchange.transport import Transport
from islandctl.exchange.verdict import Verdict, judge, names
from islandctl.ledger.entries import Commit

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
        self._states = [self._first_state(p) for p in range(settings.fragments)]
        self._flights: list[Flight | None] = [None] * settings.fragments
        self._metrics = Metrics(settings.fragments)
        self._latch = Latch()
        self._courier = Courier(transport, Identity(run, config_hash, attempt, cell, seed), self._latch)
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
            self._states, self._follower, self._courier, self._latch, settings.outer, self.schedule, cell
        )

    def _first_state(self, p: int) -> FragmentState:
        fragment = self.map.fragments[p]
        anchor = self._shards.gather(fragment)
        return FragmentState(
            chunks=self._shards.owned(fragment),
            anchor=anchor,
            momentum={c: torch.zeros_like(value) for c, value in anchor.items()},
            residual={c: torch.zeros_like(value) for c, value in anchor.items()},
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
        self._follower.start([state.resolved_seq for state in self._states])
        self._step += 1
        for state in self._states:
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
        self._follower.start([state.resolved_seq for state in self._states])
        self._settle(finishing=True)
        while not all(state.final for state in self._states):
            for p, state in enumerate(self._states):
                last = self.schedule.last_window(p)
                if not state.final:
                    # Regular rounds left undone (steps without the relay): the other cells still wait for them.
                    self._open(p, last if state.window < last else max(self.schedule.final_window, state.window + 1))
            self._settle(finishing=True)
        for p, state in enumerate(self._states):
            for name, anchor in self._shards.scatter(self.map.fragments[p], state.anchor):
                with torch.no_grad():
                    self._shards.local(name).copy_(anchor)

    def should_stop_at(self) -> int | None:
        """The step at which all cells checkpoint and end because of a stop entry; None: go on. Equal on all ranks."""
        return self._stop_at

    def versions(self) -> tuple[int, ...]:
        """Of every fragment, the commits that its anchor contains."""
        return tuple(state.version for state in self._states)

    def metrics(self) -> dict[str, Any]:
        """Counts and the last round's figures of each fragment; see ``Metrics``. Bytes are this rank's."""
        self._metrics.bytes_up = self._courier.bytes_up
        self._metrics.bytes_down = self._courier.bytes_down
        return self._metrics.as_dict()

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
            "metrics": self._metrics.counters(),
        }
        return store.save(self._states, self._flights, meta, self._ranks.rank)

    def needs(self, key: str) -> bool:
        """Whether ``load_state_dict`` on this rank wants this key of a checkpoint."""
        kind, *rest = key.split(".")
        if kind == "meta" or (kind == "flight" and rest[1] == "snapshot"):
            return key.endswith(f".rank{self._ranks.rank}")
        p, c = int(rest[0]), int(rest[-1])
        return p < len(self._states) and c in self._states[p].anchor

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
            self._flights = store.load(tensors, meta, self._states, parts, self._ranks.rank)
            self._step = meta["step"]
            self._metrics.restore(meta["metrics"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"rank {self._ranks.rank}: the checkpoint's exchange state is damaged") from error

    def resume(self) -> int:
        """Find the way back: call once at every start, after loading whatever there is to load. Collective.

        Reads the ledger to its end (waiting for the relay if need be) and puts packets in flight again. When commits
        since the checkpoint were made without this cell it walks them, otherwise the caller repeats its steps.

        Returns:
            The step to go on from: the loaded one, or after a walk the one before the first open round.
        """
        self._follower.start([state.resolved_seq for state in self._states])
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
        for p, flight in enumerate(self._flights):
            if flight is not None:
                flight.started = time.monotonic()
                for chunk in self._states[p].chunks:
                    payload = flight.payload[chunk.index].result()
                    self._courier.resend(
                        self._assignment(p, flight, chunk), payload, self._codec(chunk, flight.window)
                    )
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
        for p, (state, flight) in enumerate(zip(self._states, self._flights, strict=True)):
            if flight is not None:
                steps.append(flight.apply_at)
            elif self.schedule.is_final(state.window + 1):
                steps.append(self.schedule.steps + 1)
            else:
                steps.append(self.schedule.snapshot_step(p, state.window + 1))
        return min(steps)

    # A round begins

    def _open(self, p: int, window: int) -> bool:
        """Begin the fragment's next round unless one is open; ``window`` is the schedule's number for it.

        The number taken is the one after the last resolved round's, so that cells whose step counters have drifted
        apart (one trained on without the relay) meet in the same round.
        """
        state = self._states[p]
        final = self.schedule.is_final(window)
        head = self._follower.next_commit(p)
        number = state.window + 1 if not final else window
        if head is not None and head.window <= window:
            number = head.window  # decided already: this cell repeats its steps
        if self._flights[p] is not None or state.final or number > window:
            number = NONE
        (number,) = self._ranks.decide([number])
        if number == NONE:
            return False
        self._snapshot(p, number)
        return True

    def _snapshot(self, p: int, window: int) -> None:
        fragment, state = self.map.fragments[p], self._states[p]
        vector = self._owed(p)
        self._ranks.agree(self._latch.error or self._not_finite(p, window, vector))
        copies = {}
        if not self.schedule.is_final(window):
            copies = {one.name: self._shards.local(one.name).clone() for one in fragment.placements}
        flight = Flight(
            window=window,
            step=self._step,
            apply_at=min(self._step + self.schedule.overlap, self.schedule.steps),
            tokens=state.tokens,
            snapshot=copies,
            vector=vector,
            payload={},
            started=time.monotonic(),
        )
        self._flights[p] = flight
        for chunk in state.chunks:
            flight.payload[chunk.index] = self._courier.send(
                self._assignment(p, flight, chunk), vector[chunk.index], self._codec(chunk, window)
            )

    def _owed(self, p: int) -> dict[int, Tensor]:
        """v = (anchor − value) + residual of this rank's chunks, and its norm for the metrics. Collective."""
        state = self._states[p]
        vectors, moved = self._shards.gather(self.map.fragments[p]), 0.0
        for c, value in vectors.items():
            delta = torch.sub(state.anchor[c], value)
            moved += float(torch.dot(delta, delta))
            vectors[c] = torch.add(delta, state.residual[c])
        (moved,) = self._ranks.sum([moved])
        self._metrics.norm[p] = math.sqrt(moved) if moved >= 0 else moved
        return vectors

    def _not_finite(self, p: int, window: int, vectors: dict[int, Tensor]) -> IslandError | None:
        for chunk in self._states[p].chunks:
            bad = torch.nonzero(~torch.isfinite(vectors[chunk.index]))
            if len(bad):
                name = self.map.fragments[p].parameter_at(chunk.start + int(bad[0]))
                return ExchangeError(
                    f"cell {self.cell}, fragment {p}, window {window}: parameter '{name}' holds a value that is not "
                    f"finite (rank {self._ranks.rank}, step {self._step}); nothing was sent",
                    hint="lower the learning rate or clip gradients, then `islandctl resume --from` an earlier step",
                )
        return None

    def _assignment(self, p: int, flight: Flight, chunk: Chunk) -> Assignment:
        state = self._states[p]
        num_chunks = len(self.map.fragments[p].chunks)
        return Assignment(chunk, num_chunks, flight.window, state.version, state.base[chunk.index], flight.tokens)

    def _codec(self, chunk: Chunk, window: int) -> Codec:
        if self.schedule.is_final(window):
            return codec_named("fp32")
        exact = chunk.exact and self.settings.codec != "fp32"
        return codec_named("bf16" if exact else self.settings.codec)

    # A round ends

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
        width = 2 + len(self._states)
        if self._ranks.rank != 0:
            return [0] * width
        plan = [0] * width

        def settled() -> bool:
            verdicts = [self._judge(p, finishing) for p in range(len(self._states))]
            heads = [self._follower.next_commit(p) for p in range(len(self._states))]
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
        self._metrics.wait_s += time.monotonic() - began
        return plan

    def _judge(self, p: int, finishing: bool) -> Verdict:
        return judge(
            self._step,
            p,
            self._flights[p],
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
        return self._follower.in_touch or time.monotonic() < flight.started + self._patience_s

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
        """Apply the fragment's next commit. Collective."""

        def here() -> bool:
            head = self._follower.next_commit(p)
            return head is not None and head.seq == seq and self._preparer.ready(p)

        self._await(here)
        self._ranks.agree(self._latch.error)
        commit = self._follower.next_commit(p)
        assert commit is not None
        state, flight = self._states[p], self._flights[p]
        mine = flight if flight is not None and flight.window == commit.window else None
        expected = state.version + (1 if commit.named else 0)
        if commit.version != expected:
            raise DivergenceError(
                f"cell {self.cell}, fragment {p}, window {commit.window}: the commit leads to version "
                f"{commit.version}, this cell to {expected}"
            )
        named = names(commit, self.cell)
        if commit.named:
            self._install(p, commit, mine, named)
        self._metrics.resolved(named=named, late=mine is not None and self._step > mine.apply_at)
        state.window, state.resolved_seq, state.version = commit.window, seq, commit.version
        if named:
            state.tokens -= mine.tokens if mine is not None else state.tokens
        if mine is not None:
            self._flights[p] = None
        self._courier.forget(p, commit.window)
        self._preparer.next(p)

    def _install(self, p: int, commit: Commit, mine: Flight | None, named: bool) -> None:
        """New anchor, momentum, residual and value of a commit that names somebody."""
        state, fragment = self._states[p], self.map.fragments[p]
        prepared = self._preparer.take(p)
        vectors: dict[int, Tensor] = {}
        if named:
            vectors = mine.vector if mine is not None else self._owed(p)
        old = dict(state.anchor)
        for c, result in prepared.items():
            if named:
                self._keep_residual(state, c, vectors[c], result)
            state.anchor[c], state.momentum[c], state.base[c] = result.anchor, result.momentum, result.base
        self._measure(p, prepared, vectors)
        if self.schedule.is_final(commit.window):
            state.final = True
        with torch.no_grad():
            if not named:
                moved = {c: torch.sub(state.anchor[c], old[c]) for c in prepared}
                for name, part in self._shards.scatter(fragment, moved):
                    self._shards.local(name).add_(part)
                return
            snapshot = mine.snapshot if mine is not None else {}
            for name, part in self._shards.scatter(fragment, state.anchor):
                value = self._shards.local(name)
                if not snapshot:  # a final round, or a walk: nothing was trained meanwhile
                    value.copy_(part)
                elif self.settings.apply == "carry":
                    value.copy_(part.add(value.sub(snapshot[name])))
                else:
                    alpha = self.settings.alpha
                    value.copy_(value.mul(alpha).add(part.mul(1 - alpha)))

    def _keep_residual(self, state: FragmentState, c: int, vector: Tensor, result: Prepared) -> None:
        assert result.own is not None
        left = torch.sub(vector, result.own)
        if self.settings.apply == "blend":
            # The value still holds the share alpha of what was owed before.
            alpha = self.settings.alpha
            left = torch.add(left.mul(1 - alpha), state.residual[c].mul(alpha))
        state.residual[c] = left

    def _measure(self, p: int, prepared: dict[int, Prepared], vectors: dict[int, Tensor]) -> None:
        state = self._states[p]
        own = mean = product = owed = left = 0.0
        for c, result in prepared.items():
            mean += result.mean_square
            if result.own is not None:
                own += result.own_square
                product += result.own_mean
                owed += float(torch.dot(vectors[c], vectors[c]))
                left += float(torch.dot(state.residual[c], state.residual[c]))
        own, mean, product, owed, left = self._ranks.sum([own, mean, product, owed, left])
        if vectors or own:
            self._metrics.cosine[p] = product / math.sqrt(own * mean) if own * mean > 0 else None
            self._metrics.residual[p] = math.sqrt(left / owed) if owed > 0 else None
