"""The rounds of one cell: a snapshot becomes packets, a commit becomes values. Collective over the cell's ranks."""

from __future__ import annotations

import logging
import math
import time

import torch
from torch import Tensor

from islandctl.config.recipe import Exchange
from islandctl.errors import DivergenceError, ExchangeError, IslandError
from islandctl.exchange.codecs import Codec, codec_named
from islandctl.exchange.courier import Assignment, Courier
from islandctl.exchange.follower import Latch
from islandctl.exchange.fragments import Chunk, FragmentMap
from islandctl.exchange.metrics import Metrics
from islandctl.exchange.prepare import Prepared
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.state import Flight, FragmentState
from islandctl.exchange.verdict import names
from islandctl.ledger.entries import Commit

log = logging.getLogger(__name__)


class Rounds:
    """All fragments of the cell, as this rank holds them, and what happens to them.

    When it happens is not decided here: all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        settings: Exchange,
        schedule: Schedule,
        fragments: FragmentMap,
        *,
        cell: int,
        ranks: Ranks,
        shards: Shards,
        courier: Courier,
        latch: Latch,
    ) -> None:
        self._settings = settings
        self._schedule = schedule
        self._map = fragments
        self._cell = cell
        self._ranks = ranks
        self._shards = shards
        self._courier = courier
        self._latch = latch
        self.metrics = Metrics(settings.fragments)
        self.states = [self._first_state(p) for p in range(settings.fragments)]
        self.flights: list[Flight | None] = [None] * settings.fragments

    def _first_state(self, p: int) -> FragmentState:
        fragment = self._map.fragments[p]
        anchor = self._shards.gather(fragment)
        return FragmentState(
            chunks=self._shards.owned(fragment),
            anchor=anchor,
            momentum={c: torch.zeros_like(value) for c, value in anchor.items()},
            residual={c: torch.zeros_like(value) for c, value in anchor.items()},
        )

    # A round begins

    def begin(self, p: int, window: int, step: int) -> None:
        """Take the snapshot and give it to the courier.

        Raises:
            ExchangeError: a value is not finite; nothing was sent.
        """
        state = self.states[p]
        vector = self._owed(p)
        self._ranks.agree(self._latch.error or self._not_finite(p, window, step, vector))
        copies = {}
        if not self._schedule.is_final(window):
            placements = self._map.fragments[p].placements
            copies = {one.name: self._shards.local(one.name).clone() for one in placements}
        flight = Flight(
            window=window,
            step=step,
            apply_at=min(step + self._schedule.overlap, self._schedule.steps),
            tokens=state.tokens,
            snapshot=copies,
            vector=vector,
            payload={},
            started=time.monotonic(),
        )
        self.flights[p] = flight
        for chunk in state.chunks:
            flight.payload[chunk.index] = self._courier.send(
                self._assignment(p, flight, chunk), vector[chunk.index], self._codec(chunk, window)
            )

    def put_again(self) -> None:
        """Put the packets of all rounds in flight again, after a checkpoint was loaded. Not collective."""
        for p, flight in enumerate(self.flights):
            if flight is not None:
                flight.started = time.monotonic()
                for chunk in self.states[p].chunks:
                    payload = flight.payload[chunk.index].result()
                    codec = self._codec(chunk, flight.window)
                    self._courier.resend(self._assignment(p, flight, chunk), payload, codec)

    def _owed(self, p: int) -> dict[int, Tensor]:
        """v = (anchor − value) + β·residual of this rank's chunks; its first part's norm goes to the metrics."""
        state = self.states[p]
        vectors, moved = self._shards.gather(self._map.fragments[p]), 0.0
        for c, value in vectors.items():
            delta = torch.sub(state.anchor[c], value)
            moved += float(torch.dot(delta, delta))
            vectors[c] = torch.add(delta, state.residual[c].mul(self._settings.beta))
        (moved,) = self._ranks.sum([moved])
        self.metrics.norm[p] = math.sqrt(moved) if math.isfinite(moved) else None
        return vectors

    def _not_finite(self, p: int, window: int, step: int, vectors: dict[int, Tensor]) -> IslandError | None:
        for chunk in self.states[p].chunks:
            bad = torch.nonzero(~torch.isfinite(vectors[chunk.index]))
            if len(bad):
                name = self._map.fragments[p].parameter_at(chunk.start + int(bad[0]))
                return ExchangeError(
                    f"cell {self._cell}, fragment {p}, window {window}: parameter '{name}' holds a value that is not "
                    f"finite (rank {self._ranks.rank}, step {step}); nothing was sent",
                    hint="lower the learning rate or clip gradients, then `islandctl resume --from` an earlier step",
                )
        return None

    def _assignment(self, p: int, flight: Flight, chunk: Chunk) -> Assignment:
        state, num_chunks = self.states[p], len(self._map.fragments[p].chunks)
        return Assignment(
            chunk, num_chunks, flight.window, state.version, state.base[chunk.index], flight.step, flight.tokens
        )

    def _codec(self, chunk: Chunk, window: int) -> Codec:
        if self._schedule.is_final(window):
            return codec_named("fp32")
        exact = chunk.exact and self._settings.codec != "fp32"
        if exact:
            return codec_named("bf16")
        settings = self._settings
        return codec_named(settings.codec, block=settings.block, rounding=settings.rounding)

    # A round ends

    def resolve(self, p: int, commit: Commit, prepared: dict[int, Prepared], step: int) -> None:
        """Apply the fragment's next commit.

        Args:
            prepared: its result for this rank's chunks; empty when it names nobody.
            step: inner steps done.

        Raises:
            DivergenceError: the commit's version is not this cell's next.
        """
        state, flight = self.states[p], self.flights[p]
        mine = flight if flight is not None and flight.window == commit.window else None
        expected = state.version + (1 if commit.named else 0)
        if commit.version != expected:
            raise DivergenceError(
                f"cell {self._cell}, fragment {p}, window {commit.window}: the commit leads to version "
                f"{commit.version}, this cell to {expected}"
            )
        named = names(commit, self._cell)
        if named:
            self._take_part(p, mine, prepared)
        elif commit.named:
            self._go_along(p, mine, prepared, commit.window)
        if commit.named and self._schedule.is_final(commit.window):
            state.final = True
        if commit.named:  # counted, or dropped
            state.tokens -= mine.tokens if mine is not None else state.tokens
        if commit.named and not commit.missing and not any(part.tokens for part in commit.named):
            state.at_end = True
        if mine is not None or commit.named:  # of another window: the anchor has moved on, no commit can name it now
            self.flights[p] = None
        state.window = max(state.window, commit.window)
        state.resolved_seq, state.version = commit.seq, commit.version
        self._courier.forget(p, commit.window)
        self.metrics.resolved(named=named, late=mine is not None and step > mine.apply_at)

    @torch.no_grad()
    def _take_part(self, p: int, mine: Flight | None, prepared: dict[int, Prepared]) -> None:
        """The commit names this cell: residual and value follow what was sent.

        Without a flight (a walk) the packet is from an earlier life, and so is what its encoding left out: the
        learning is in the anchor, and nothing is owed.
        """
        state = self.states[p]
        for c, result in prepared.items():
            assert result.own is not None
            if mine is None:
                state.residual[c] = torch.zeros_like(result.anchor)
            else:
                left = torch.sub(mine.vector[c], result.own)
                if self._settings.apply == "blend":  # the value still holds the share alpha of what was owed, whole
                    alpha = self._settings.alpha
                    left = torch.add(left.mul(1 - alpha), state.residual[c].mul(alpha))
                state.residual[c] = left
            _install(state, c, result)
        if mine is not None:
            self._measure(p, prepared, mine.vector)
        self._take_over(p, mine, blend=self._settings.apply == "blend")

    @torch.no_grad()
    def _go_along(self, p: int, mine: Flight | None, prepared: dict[int, Prepared], window: int) -> None:
        """The commit names only others: the round is missed, and with it what this cell has learnt for it.

        It stands where the others stand, plus what it has trained since its own snapshot for that round. To bring
        the rest later, on top of what they have learnt meanwhile, would take the same steps twice.
        """
        state = self.states[p]
        dropped = mine.tokens if mine is not None else state.tokens
        if dropped:
            told = "fragment %d, window %d: committed without this cell; the %d tokens trained for it are dropped"
            log.warning(told, p, window, dropped)
        for c, result in prepared.items():
            _install(state, c, result)
        self._take_over(p, mine, blend=False)

    @torch.no_grad()
    def _take_over(self, p: int, mine: Flight | None, *, blend: bool) -> None:
        """The value becomes the anchor, plus what was trained since the snapshot."""
        snapshot = mine.snapshot if mine is not None else {}
        for name, anchor in self._shards.scatter(self._map.fragments[p], self.states[p].anchor):
            value = self._shards.local(name)
            if not snapshot:  # a walk, or a final round: nothing was trained meanwhile
                value.copy_(anchor)
            elif blend:
                alpha = self._settings.alpha
                value.copy_(value.mul(alpha).add(anchor.mul(1 - alpha)))
            else:
                value.copy_(anchor.add(value.sub(snapshot[name])))

    @torch.no_grad()
    def take_anchors(self) -> None:
        """Every value becomes its anchor: the end of the run."""
        for fragment, state in zip(self._map.fragments, self.states, strict=True):
            for name, anchor in self._shards.scatter(fragment, state.anchor):
                self._shards.local(name).copy_(anchor)

    def _measure(self, p: int, prepared: dict[int, Prepared], vectors: dict[int, Tensor]) -> None:
        sums = [0.0] * 5
        for c, result in prepared.items():
            owed, left = vectors[c], self.states[p].residual[c]
            of_chunk = (result.own_square, result.mean_square, result.own_mean, torch.dot(owed, owed).item(),
                        torch.dot(left, left).item())  # fmt: skip
            sums = [total + value for total, value in zip(sums, of_chunk, strict=True)]
        own, mean, product, owed_square, left_square = self._ranks.sum(sums)
        self.metrics.cosine[p] = product / math.sqrt(own * mean) if own * mean > 0 else None
        self.metrics.residual[p] = math.sqrt(left_square / owed_square) if owed_square > 0 else None


def _install(state: FragmentState, c: int, result: Prepared) -> None:
    state.anchor[c], state.momentum[c], state.base[c] = result.anchor, result.momentum, result.base
