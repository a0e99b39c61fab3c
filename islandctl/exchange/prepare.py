"""Computes a commit's result before it is due: fetches what it names and takes the outer step, chunk by chunk."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from islandctl.config.recipe import Outer
from islandctl.exchange.courier import Courier
from islandctl.exchange.follower import Follower, Latch
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.outer import Average, OuterState, outer_optimizer, weighted_mean
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.state import FragmentState, base_hash
from islandctl.ledger.entries import Commit


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


class Preparer:
    """Of each fragment, the result of the next commit, on top of the anchor that is installed now.

    At most one commit of a fragment is prepared at a time: the next one builds on its result.
    """

    def __init__(
        self,
        states: list[FragmentState],
        follower: Follower,
        courier: Courier,
        latch: Latch,
        outer: Outer,
        schedule: Schedule,
        cell: int,
    ) -> None:
        self._states = states
        self._follower = follower
        self._courier = courier
        self._latch = latch
        self._outer = outer_optimizer(outer)
        self._schedule = schedule
        self._cell = cell
        self._futures: list[tuple[int, dict[int, Future[Prepared]]] | None] = [None] * len(states)

    def begin(self, fragment: int) -> None:
        """Prepare the fragment's next commit, if there is one that names somebody. Any thread may call."""
        with self._latch.changed:
            head = self._follower.next_commit(fragment)
            if head is None or not head.named or self._futures[fragment] is not None or self._latch.closed.is_set():
                return
            futures = {}
            for chunk in self._states[fragment].chunks:
                futures[chunk.index] = self._courier.fetcher.submit(self._prepare, head, chunk)
                futures[chunk.index].add_done_callback(lambda _: self._latch.notify())
            self._futures[fragment] = (head.seq, futures)

    def ready(self, fragment: int) -> bool:
        """Whether the next commit is there and can be installed at once."""
        head = self._follower.next_commit(fragment)
        if head is None:
            return False
        if not head.named:
            return True
        begun = self._futures[fragment]
        return begun is not None and begun[0] == head.seq and all(future.done() for future in begun[1].values())

    def take(self, fragment: int) -> dict[int, Prepared]:
        """The result by chunk index, only when ``ready`` and nothing failed; empty when nobody is named."""
        begun = self._futures[fragment]
        if begun is None:
            return {}
        return {c: future.result() for c, future in begun[1].items()}

    def next(self, fragment: int) -> None:
        """The commit is installed: go on to the one after it."""
        with self._latch.changed:
            self._follower.pop(fragment)
            self._futures[fragment] = None
            self.begin(fragment)

    def _prepare(self, commit: Commit, chunk: Chunk) -> Prepared:
        try:
            return self._outer_step(commit, chunk)
        except BaseException as error:
            self._latch.fail(error)
            raise

    def _outer_step(self, commit: Commit, chunk: Chunk) -> Prepared:
        state, c = self._states[chunk.fragment], chunk.index
        parts = {part.cell: self._courier.fetch(commit, part, chunk, state.base[c]) for part in commit.named}
        mean = weighted_mean(list(parts.values()), [part.tokens for part in commit.named])
        # Where nothing was trained a momentum step would only coast: what is owed is shared out as it is.
        plain = self._schedule.is_whole(commit.window) or not any(part.tokens for part in commit.named)
        optimizer = Average() if plain else self._outer
        anchor, outer = optimizer.step(state.anchor[c], state.outer[c], mean)
        own = parts.get(self._cell)
        return Prepared(
            anchor=anchor,
            outer=outer,
            base=base_hash(anchor, outer),
            own=own,
            own_square=float(torch.dot(own, own)) if own is not None else 0.0,
            mean_square=float(torch.dot(mean, mean)),
            own_mean=float(torch.dot(own, mean)) if own is not None else 0.0,
        )
