"""The butterfly exchange over stacked cells: 2^k cells mix in pairs, no shared anchor, no all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from islandctl.exchange import mixing
from islandctl.exchange.schedule import Schedule
from islandctl.ledger.pairs import Pairing
from scripts.experiments.equal_compute_lib.cells import Cells, Chunks
from scripts.experiments.equal_compute_lib.model import Values
from scripts.experiments.equal_compute_lib.settings import Butterfly

Place = tuple[int, int, int]
"""Cell, the bit in which its partner differs, and fragment."""


@dataclass
class Flight:
    """A round between snapshot and apply: what every cell told."""

    window: int
    told: list[Chunks]


class ButterflyExchange:
    """2^k cells in pairs; what the engine's ``exchange.paired`` does, when every packet comes at once.

    Args:
        values: (C, *shape) each, equal in all cells; written to in place.
        settings: of the exchange.
        steps: inner steps from here on.
        seed: of the codecs' random bits.
        chunk: values per chunk.

    Raises:
        ConfigError: the number of cells is no power of two.
    """

    def __init__(self, values: Values, settings: Butterfly, *, steps: int, seed: int, chunk: int = 4_194_304) -> None:
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
        self.pairing = Pairing(self._cells.num_cells)
        self.schedule = Schedule(steps, settings.window, settings.fragments, settings.overlap)
        self._first = [self._cells.gather(0, p) for p in range(settings.fragments)]
        self._reference: dict[Place, Chunks] = {}
        self._residual: dict[Place, Chunks] = {}
        self._flights: list[Flight | None] = [None] * settings.fragments
        self._step = 0

    @torch.no_grad()
    def step(self, tokens: list[int]) -> None:
        """One inner step is done."""
        self._step += 1
        self._settle()
        due = self.schedule.begins_at(self._step)
        if due is not None:
            self._flights[due.fragment] = self._begin(due.fragment, due.window)
            if self._settings.overlap == 0:
                self._settle()

    @torch.no_grad()
    def finish(self) -> None:
        """What is in flight, then k full-precision rounds over every fragment: all cells end with their mean."""
        self._settle()
        for p in range(self._settings.fragments):
            for number in range(self.pairing.num_bits):
                window = self.schedule.final_window + number
                self._resolve(p, self._begin(p, window))

    def _settle(self) -> None:
        for p, flight in enumerate(self._flights):
            if flight is not None and self.schedule.apply_step(p, flight.window) <= self._step:
                self._flights[p] = None
                self._resolve(p, flight)

    def _begin(self, p: int, window: int) -> Flight:
        last, bit = self.schedule.is_final(window), self.pairing.bit(p, window)
        told = []
        for cell in range(self._cells.num_cells):
            place, value = (cell, bit, p), self._cells.gather(cell, p)
            reference = self._reference.get(place, self._first[p])
            residual = self._residual.get(place, {})
            said, left = {}, {}
            for chunk in self._cells.map.fragments[p].chunks:
                c = chunk.index
                if last:
                    said[c] = self._cells.send(value[c], chunk, cell, window, exact=True)
                    continue
                kept = residual.get(c, torch.zeros_like(value[c]))
                vector = mixing.owed(value[c], reference[c], kept.mul(self._cells.beta))
                sent = self._cells.send(vector, chunk, cell, window, exact=False)
                said[c], left[c] = mixing.told(reference[c], sent), torch.sub(vector, sent)
            told.append(said)
            self._residual[place] = left
        return Flight(window, told)

    def _resolve(self, p: int, flight: Flight) -> None:
        last, bit = self.schedule.is_final(flight.window), self.pairing.bit(p, flight.window)
        for cell, own in enumerate(flight.told):
            other = flight.told[self.pairing.partner(cell, p, flight.window)]
            middle = {c: mixing.midpoint(own[c], other[c]) for c in own}
            half = {c: mixing.half_step(own[c], other[c]) for c in own}
            self._reference[(cell, bit, p)] = middle
            local = self._cells.local(cell, p)
            for name, part in self._cells.scatter(p, middle if last else half):
                if last:
                    local[name].copy_(part)
                else:
                    local[name].add_(part)
