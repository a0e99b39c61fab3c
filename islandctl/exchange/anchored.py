"""Rounds of all cells with one anchor: what each has learnt since goes into it, through the outer optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from islandctl.exchange.feedback import left_out, owed
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.outer import Average, OuterState, outer_optimizer, weighted_mean
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.state import AnchorState, Flight, outer_hash
from islandctl.exchange.verdict import names
from islandctl.ledger.entries import Commit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """One chunk's result of one commit, ready to be installed."""

    anchor: Tensor
    outer: OuterState
    base: str
    own: Tensor | None
    """What this cell sent, decoded; None when the commit does not name it."""
    own_square: float
    mean_square: float
    own_mean: float
    """Sums for the cosine between own and mean contribution."""


class Anchored(Rounds[AnchorState, Prepared]):
    """The two-site mode, for any number of cells. A version counts the commits in the anchor."""

    def _first_state(self, p: int) -> AnchorState:
        fragment = self._map.fragments[p]
        anchor, optimizer = self._shards.gather(fragment), outer_optimizer(self._settings.outer)
        return AnchorState(
            chunks=self._shards.owned(fragment),
            anchor=anchor,
            residual={c: torch.zeros_like(value) for c, value in anchor.items()},
            outer={c: optimizer.first_state(len(value)) for c, value in anchor.items()},
        )

    # A round begins

    def _vectors(self, p: int, window: int) -> dict[int, Tensor]:
        """v = (anchor − value) + β·residual of this rank's chunks; its first part's norm goes to the metrics."""
        state = self.states[p]
        vectors, moved = self._shards.gather(self._map.fragments[p]), 0.0
        for c, value in vectors.items():
            delta = torch.sub(state.anchor[c], value)
            moved += float(torch.dot(delta, delta))
            vectors[c] = owed(delta, state.residual[c], self._settings.beta)
        self._norm(p, moved)
        return vectors

    def _snapshot(self, p: int, window: int) -> dict[str, Tensor]:
        if self._schedule.is_whole(window):
            return {}
        return {one.name: self._shards.local(one.name).clone() for one in self._map.fragments[p].placements}

    def _base(self, p: int, window: int, chunk: int) -> tuple[int, str]:
        return self.states[p].version, self.states[p].base[chunk]

    def next_last(self) -> list[tuple[int, int]]:
        found = []
        for p, state in enumerate(self.states):
            if self.flights[p] is None and not state.final:
                number = state.window + 1
                regular = not state.at_end and number <= self._schedule.last_window(p)
                found.append((p, number if regular else max(self._schedule.final_window, number)))
        return found

    # Its commit

    def comes_next(self, p: int, commit: Commit | None) -> Commit | None:
        return commit

    def outdated(self, p: int, commit: Commit) -> bool:
        return False

    def applied(self) -> Callable[[Commit], bool]:
        seqs = [state.resolved_seq for state in self.states]
        return lambda commit: commit.seq <= seqs[commit.fragment]

    def missed(self, commit: Commit) -> bool:
        """Not the seed, which never names but the first cell."""
        others = bool(commit.named) and not names(commit, self._cell)
        return others and not self._schedule.is_seed(commit.window)

    def step_of(self, commit: Commit) -> int:
        return max((part.step for part in commit.named), default=0)

    def order(self, commit: Commit) -> tuple[int, ...]:
        return (commit.seq,)

    def work(self, commit: Commit, chunk: Chunk) -> Prepared:
        """The outer step."""
        state, c = self.states[chunk.fragment], chunk.index
        parts = {part.cell: self._courier.fetch(commit, part, chunk, state.base[c]) for part in commit.named}
        mean = weighted_mean(list(parts.values()), [part.tokens for part in commit.named])
        # Where nothing was trained a momentum step would only coast: what is owed is shared out as it is.
        plain = self._schedule.is_whole(commit.window) or not any(part.tokens for part in commit.named)
        optimizer = Average() if plain else outer_optimizer(self._settings.outer)
        anchor, outer = optimizer.step(state.anchor[c], state.outer[c], mean)
        own = parts.get(self._cell)
        return Prepared(
            anchor=anchor,
            outer=outer,
            base=outer_hash(anchor, outer),
            own=own,
            own_square=float(torch.dot(own, own)) if own is not None else 0.0,
            mean_square=float(torch.dot(mean, mean)),
            own_mean=float(torch.dot(own, mean)) if own is not None else 0.0,
        )

    # A round ends

    def _version_after(self, p: int, commit: Commit) -> int:
        return self.states[p].version + (1 if commit.named else 0)

    def _apply(self, p: int, commit: Commit, mine: Flight | None, results: dict[int, Prepared]) -> bool:
        state = self.states[p]
        if names(commit, self._cell):
            self._take_part(p, mine, results)
        elif commit.named:
            self._go_along(p, mine, results, commit.window)
        if commit.named and self._schedule.is_final(commit.window):
            state.final = True
        if commit.named and not commit.missing and not any(part.tokens for part in commit.named):
            state.at_end = True
        return bool(commit.named)  # the anchor has moved on: no commit can name a packet on the old one

    @torch.no_grad()
    def _take_part(self, p: int, mine: Flight | None, results: dict[int, Prepared]) -> None:
        """The commit names this cell: residual and value follow what was sent.

        Without a flight (a walk) the packet is from an earlier life, and so is what its encoding left out: the
        learning is in the anchor, and nothing is owed. Nor after the seed, where all take over the values that the
        ledger names: those of an earlier life can be another training altogether.
        """
        state, own_step = self.states[p], self._is_own_step(p, mine, results)
        for c, result in results.items():
            assert result.own is not None
            if mine is None or self._schedule.is_seed(mine.window):
                state.residual[c] = torch.zeros_like(result.anchor)
            else:
                left = left_out(mine.vector[c], result.own)
                if self._settings.apply == "blend":  # the value still holds the share alpha of what was owed, whole
                    alpha = self._settings.alpha
                    left = torch.add(left.mul(1 - alpha), state.residual[c].mul(alpha))
                state.residual[c] = left
            _install(state, c, result)
        if mine is not None:
            self._measure(p, results, mine.vector)
        if not own_step:
            self._take_over(p, mine, blend=self._settings.apply == "blend")

    def _is_own_step(self, p: int, mine: Flight | None, results: dict[int, Prepared]) -> bool:
        """A run of one cell, whose anchor has done just what the cell itself had done: its value stays as it is.

        Otherwise anchor − (anchor − value), in fp32 not always the value, would change its last bit. Collective.
        """
        if not self._alone or mine is None or self._settings.apply != "carry":
            return False
        state = self.states[p]
        changed = any(
            state.residual[c].any() or not torch.equal(result.anchor, torch.sub(state.anchor[c], mine.vector[c]))
            for c, result in results.items()
        )
        return self._ranks.most([int(changed)]) == [0]

    @torch.no_grad()
    def _go_along(self, p: int, mine: Flight | None, results: dict[int, Prepared], window: int) -> None:
        """The commit names only others: the round is missed, and with it what this cell has learnt for it.

        It stands where the others stand, plus what it has trained since its own snapshot for that round. To bring
        the rest later, on top of what they have learnt meanwhile, would take the same steps twice.
        """
        state = self.states[p]
        dropped = mine.tokens if mine is not None else state.tokens
        if dropped and self._ranks.leads:
            told = "fragment %d, window %d: committed without this cell; the %d tokens trained for it are dropped"
            log.warning(told, p, window, dropped)
        for c, result in results.items():
            _install(state, c, result)
        self._take_over(p, mine, blend=False)

    @torch.no_grad()
    def _take_over(self, p: int, mine: Flight | None, *, blend: bool) -> None:
        """The value becomes the anchor, plus what was trained since the snapshot."""
        snapshot = mine.snapshot if mine is not None else {}
        for name, anchor in self._shards.scatter(self._map.fragments[p], self.states[p].anchor):
            value = self._shards.local(name)
            if not snapshot:  # a walk, the seed or a final round: nothing was trained meanwhile
                value.copy_(anchor)
            elif blend:
                alpha = self._settings.alpha
                value.copy_(value.mul(alpha).add(anchor.mul(1 - alpha)))
            else:
                value.copy_(anchor.add(value.sub(snapshot[name])))

    @torch.no_grad()
    def finish(self) -> None:
        """Every value becomes its anchor. One cell alone has nobody to be equal with."""
        if self._alone:
            return
        for fragment, state in zip(self._map.fragments, self.states, strict=True):
            for name, anchor in self._shards.scatter(fragment, state.anchor):
                self._shards.local(name).copy_(anchor)

    def _measure(self, p: int, results: dict[int, Prepared], vectors: dict[int, Tensor]) -> None:
        sums = [0.0] * 5
        for c, result in results.items():
            vector, left = vectors[c], self.states[p].residual[c]
            of_chunk = (result.own_square, result.mean_square, result.own_mean, torch.dot(vector, vector).item(),
                        torch.dot(left, left).item())  # fmt: skip
            sums = [total + value for total, value in zip(sums, of_chunk, strict=True)]
        own, mean, product, owed_square, left_square = self._ranks.sum(sums)
        self.metrics.cosine[p] = product / math.sqrt(own * mean) if own * mean > 0 else None
        self.metrics.residual[p] = math.sqrt(left_square / owed_square) if owed_square > 0 else None


def _install(state: AnchorState, c: int, result: Prepared) -> None:
    state.anchor[c], state.outer[c], state.base[c] = result.anchor, result.outer, result.base
