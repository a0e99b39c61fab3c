"""The two-site exchange over stacked cells: the engine's own pure functions, without its threads and its relay.

Every packet comes at once and every commit names all cells, so the anchor and the outer momentum are kept once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from islandctl.config.exchange import Outer
from islandctl.exchange.outer import Average, OuterState, outer_optimizer, weighted_mean
from islandctl.exchange.schedule import Schedule
from scripts.experiments.equal_compute_lib.cells import Cells, Chunks, cosine
from scripts.experiments.equal_compute_lib.model import Values
from scripts.experiments.equal_compute_lib.settings import Anchored


@dataclass
class Flight:
    """A round between snapshot and apply."""

    window: int
    tokens: list[int]
    snapshots: list[Values]
    vectors: list[Chunks]


class AnchoredExchange:
    """All cells share one anchor.

    Args:
        values: (C, *shape) each, equal in all cells; written to in place.
        settings: of the exchange.
        steps: inner steps from here on.
        seed: of the codecs' random bits.
        chunk: values per chunk.
    """

    def __init__(self, values: Values, settings: Anchored, *, steps: int, seed: int, chunk: int = 4_194_304) -> None:
        self._settings = settings
        self._cells = Cells(
            values,
            fragments=settings.fragments,
            chunk=chunk,
            codec=settings.codec,
            rounding=settings.rounding,
            feedback=settings.feedback,
            seed=seed,
        )
        self.link = self._cells.link
        self.schedule = Schedule(steps, settings.window, settings.fragments, settings.overlap)
        fragments, cells = range(settings.fragments), range(self._cells.num_cells)
        self.anchor = [self._cells.gather(0, p) for p in fragments]
        self._outer = outer_optimizer(Outer(lr=settings.outer_lr, momentum=settings.outer_momentum))
        self.outer: list[dict[int, OuterState]] = [
            {c: self._outer.first_state(len(value)) for c, value in anchor.items()} for anchor in self.anchor
        ]
        self.residual = [[_zeros(anchor) for anchor in self.anchor] for _ in cells]
        self._tokens = [[0] * settings.fragments for _ in cells]
        self._flights: list[Flight | None] = [None] * settings.fragments
        self._step = 0

    @torch.no_grad()
    def step(self, tokens: list[int]) -> None:
        """One inner step is done.

        Args:
            tokens: that each cell trained in it.
        """
        self._step += 1
        for cell, count in enumerate(tokens):
            for p in range(self._settings.fragments):
                self._tokens[cell][p] += count
        self._settle()
        due = self.schedule.begins_at(self._step)
        if due is not None:
            self._begin(due.fragment, due.window)
            if self._settings.overlap == 0:
                self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """What is in flight, then exact averages, residuals included. All cells end with the anchor."""
        self._settle()
        for p in range(self._settings.fragments):
            self._begin(p, self.schedule.final_window)
            self._resolve(p)
            for cell in range(self._cells.num_cells):
                local = self._cells.local(cell, p)
                for name, anchor in self._cells.scatter(p, self.anchor[p]):
                    local[name].copy_(anchor)

    def _settle(self) -> None:
        for p, flight in enumerate(self._flights):
            if flight is not None and self.schedule.apply_step(p, flight.window) <= self._step:
                self._resolve(p)

    def _begin(self, p: int, window: int) -> None:
        cells = range(self._cells.num_cells)
        snapshots = [{n: v.clone() for n, v in self._cells.local(cell, p).items()} for cell in cells]
        vectors = [self._owed(cell, p) for cell in cells]
        tokens = [self._tokens[cell][p] for cell in cells]
        for cell in cells:
            self._tokens[cell][p] = 0
        self._flights[p] = Flight(window, tokens, snapshots, vectors)

    def _owed(self, cell: int, p: int) -> Chunks:
        """v = (anchor − value) + β · residual."""
        vectors = self._cells.gather(cell, p)
        for c, value in vectors.items():
            delta = torch.sub(self.anchor[p][c], value)
            vectors[c] = torch.add(delta, self.residual[cell][p][c].mul(self._cells.beta))
        return vectors

    def _resolve(self, p: int) -> None:
        flight = self._flights[p]
        assert flight is not None
        self._flights[p] = None
        final = self.schedule.is_final(flight.window)
        sent: list[Chunks] = [{} for _ in flight.vectors]
        for chunk in self._cells.map.fragments[p].chunks:
            c = chunk.index
            for cell, vectors in enumerate(flight.vectors):
                sent[cell][c] = self._cells.send(vectors[c], chunk, cell, flight.window, exact=final)
            mean = weighted_mean([each[c] for each in sent], flight.tokens)
            plain = final or not any(flight.tokens)
            optimizer = Average() if plain else self._outer
            self.anchor[p][c], self.outer[p][c] = optimizer.step(self.anchor[p][c], self.outer[p][c], mean)
        if len(sent) > 1 and not final:
            self.link.cosines.append(cosine(sent[0], sent[1]))
        for cell, vectors in enumerate(flight.vectors):
            self._keep(cell, p, {c: torch.sub(vectors[c], sent[cell][c]) for c in vectors})
            if not final:
                self._apply(cell, p, flight.snapshots[cell])

    def _keep(self, cell: int, p: int, left: Chunks) -> None:
        """The residual of a round that counted."""
        for c, part in left.items():
            if self._settings.apply == "blend":
                alpha = self._settings.alpha
                part = torch.add(part.mul(1 - alpha), self.residual[cell][p][c].mul(alpha))
            self.residual[cell][p][c] = part

    def _apply(self, cell: int, p: int, snapshot: Values) -> None:
        local = self._cells.local(cell, p)
        for name, anchor in self._cells.scatter(p, self.anchor[p]):
            value = local[name]
            if self._settings.apply == "carry":
                value.copy_(anchor.add(value.sub(snapshot[name])))
            else:
                alpha = self._settings.alpha
                value.copy_(value.mul(alpha).add(anchor.mul(1 - alpha)))


def _zeros(chunks: Chunks) -> Chunks:
    return {c: torch.zeros_like(value) for c, value in chunks.items()}


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
