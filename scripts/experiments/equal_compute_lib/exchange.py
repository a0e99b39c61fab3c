"""The exchange between stacked cells: the engine's own rounds, without its threads and its relay.

Every packet comes at once, and every commit names all whom the round concerns.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from islandctl.config.exchange import Exchange as Recipe
from islandctl.config.exchange import Outer
from islandctl.exchange import anchored, paired
from islandctl.exchange.codecs import Codec, Key, decode, encode
from islandctl.exchange.courier import Assignment, Courier
from islandctl.exchange.follower import Latch
from islandctl.exchange.fragments import Chunk, fragment_map
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.state import done
from islandctl.ledger.entries import Commit, Contribution
from islandctl.ledger.pairs import Pairing
from scripts.experiments.equal_compute_lib.model import Values
from scripts.experiments.equal_compute_lib.settings import Anchored, Butterfly

Post = dict[tuple[int, int], dict[int, Tensor]]
"""What the packets in flight decode to, by (cell, fragment) and chunk."""


class HandToHand(Courier):
    """One cell's courier: packets are handed over where they are encoded.

    Args:
        cell: whose packets it sends.
        seed: of the codecs' random bits.
        post: shared by all cells.
    """

    def __init__(self, cell: int, seed: int, post: Post) -> None:  # nothing of the threads above it
        self._cell, self._seed, self._post = cell, seed, post
        self.bytes_up = 0

    def send(self, assignment: Assignment, vector: Tensor, codec: Codec) -> Future[bytes]:
        chunk = assignment.chunk
        payload = encode(codec, vector, Key(self._seed, self._cell, chunk.fragment, assignment.window, chunk.index))
        self._post.setdefault((self._cell, chunk.fragment), {})[chunk.index] = decode(payload)
        self.bytes_up += len(payload)
        return done(payload)

    def fetch(self, commit: Commit, part: Contribution, chunk: Chunk, base: str) -> Tensor:
        return self._post[(part.cell, chunk.fragment)][chunk.index]

    def forget(self, fragment: int, window: int) -> None:
        """The next packet takes the place of the last."""


class CellsExchange:
    """All cells' rounds.

    Args:
        values: (C, *shape) each, equal in all cells; written to in place.
        settings: of the exchange.
        steps: inner steps from here on.
        seed: of the codecs' random bits.
        chunk: values per chunk.

    Raises:
        ConfigError: the number of a butterfly's cells is no power of two.
    """

    def __init__(
        self, values: Values, settings: Anchored | Butterfly, *, steps: int, seed: int, chunk: int = 4_194_304
    ) -> None:
        recipe, ranks = _recipe(settings, chunk), Ranks(None)
        cells = range(next(iter(values.values())).shape[0])
        self.pairing = Pairing(len(cells)) if recipe.mode == "butterfly" else None
        self.schedule = Schedule(steps, recipe.window, recipe.fragments, recipe.overlap)
        self.cosines: list[float] = []
        """Between the first two cells' contributions to the anchor, a round each."""
        self._post: Post = {}
        self._couriers = [HandToHand(cell, seed, self._post) for cell in cells]
        kind: Any = anchored.Anchored if self.pairing is None else partial(paired.Paired, self.pairing)
        shapes = [(name, tuple(value.shape[1:])) for name, value in values.items()]
        self._cells: list[Rounds[Any, Any]] = [
            kind(
                recipe,
                self.schedule,
                fragment_map(shapes, recipe.fragments, recipe.chunk),
                cell=cell,
                num_cells=len(cells),
                ranks=ranks,
                shards=Shards({name: value.detach()[cell] for name, value in values.items()}, ranks),
                courier=self._couriers[cell],
                latch=Latch(),
            )
            for cell in cells
        ]
        self._fragments = range(recipe.fragments)
        self._step = 0

    @property
    def bytes_up(self) -> int:
        """Payloads that all cells have sent."""
        return sum(courier.bytes_up for courier in self._couriers)

    @torch.no_grad()
    def step(self, tokens: list[int]) -> None:
        """One inner step is done.

        Args:
            tokens: that each cell trained in it.
        """
        self._step += 1
        for rounds, count in zip(self._cells, tokens, strict=True):
            for state in rounds.states:
                state.tokens += count
        self._settle()
        due = self.schedule.begins_at(self._step)
        if due is not None:
            self._begin(due.fragment, due.window)
            if self.schedule.overlap == 0:  # else what begins at the very last step ends in ``finish``
                self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """What is in flight, then the exact last rounds: all cells end with the same values."""
        self._settle()
        for number in range(1 if self.pairing is None else self.pairing.num_bits):
            for p in self._fragments:
                self._begin(p, self.schedule.final_window + number)
                self._resolve(p)
        for rounds in self._cells:
            rounds.finish()

    def _begin(self, p: int, window: int) -> None:
        for rounds in self._cells:
            rounds.begin(p, window, self._step)

    def _settle(self) -> None:
        for p in self._fragments:
            flight = self._cells[0].flights[p]
            if flight is not None and flight.apply_at <= self._step:
                self._resolve(p)

    def _resolve(self, p: int) -> None:
        commits = self._commits(p)
        results = [
            {chunk.index: rounds.work(commit, chunk) for chunk in rounds.states[p].chunks}
            for rounds, commit in zip(self._cells, commits, strict=True)
        ]
        for rounds, commit, result in zip(self._cells, commits, results, strict=True):
            rounds.resolve(p, commit, result, self._step)
        if self.pairing is None and len(self._cells) > 1 and not self.schedule.is_final(commits[0].window):
            self.cosines.append(_cosine(self._post[(0, p)], self._post[(1, p)]))

    def _commits(self, p: int) -> list[Commit]:
        """Each cell's commit of the round in flight."""
        parts, window = [], 0
        for cell, rounds in enumerate(self._cells):
            flight = rounds.flights[p]
            assert flight is not None
            window = flight.window
            parts.append(Contribution.model_construct(cell=cell, step=flight.step, tokens=flight.tokens, chunks=()))
        if self.pairing is None:
            return [_commit(p, window, self._cells[0].states[p].version + 1, parts)] * len(parts)
        pairs = [sorted((cell, self.pairing.partner(cell, p, window))) for cell in range(len(parts))]
        return [_commit(p, window, window + 1, [parts[cell] for cell in pair]) for pair in pairs]


def _commit(p: int, window: int, version: int, named: list[Contribution]) -> Commit:
    return Commit.model_construct(
        seq=0, fragment=p, window=window, version=version, named=tuple(named), missing=(), reason="complete"
    )


def _recipe(settings: Anchored | Butterfly, chunk: int) -> Recipe:
    """The same as a recipe's section ``exchange``."""
    shared = settings.model_dump(include={"window", "fragments", "overlap", "codec", "rounding", "feedback"})
    if isinstance(settings, Butterfly):
        return Recipe(mode="butterfly", chunk=chunk, **shared)
    outer = Outer(lr=settings.outer_lr, momentum=settings.outer_momentum)
    return Recipe(chunk=chunk, apply=settings.apply, alpha=settings.alpha, outer=outer, **shared)


def _cosine(left: Mapping[int, Tensor], right: Mapping[int, Tensor]) -> float:
    """Between two contributions; 0 when one is zero."""
    one, two = (torch.cat([part.double() for part in side.values()]) for side in (left, right))
    norm = float(one.norm() * two.norm())
    return float(one @ two) / norm if norm else 0.0


def mean_of(values: Values) -> Values:
    """The mean over all cells, (1, *shape)."""
    return {name: value.detach().mean(0, keepdim=True) for name, value in values.items()}


def spread(values: Values) -> float:
    """How far the cells stand apart: RMS distance from their mean over the RMS of the mean."""
    apart: Tensor = torch.zeros((), dtype=torch.float64)
    whole: Tensor = torch.zeros((), dtype=torch.float64)
    for value in values.values():
        mean = value.detach().mean(0, keepdim=True)
        apart += (value.detach() - mean).double().square().mean(0).sum()
        whole += mean.double().square().sum()
    return float((apart / whole).sqrt())
