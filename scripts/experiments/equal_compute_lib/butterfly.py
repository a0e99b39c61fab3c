"""The butterfly exchange over stacked cells: 2^k cells mix in pairs, no shared anchor, no all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from islandctl.exchange.schedule import Schedule
from scripts.experiments.equal_compute_lib.cells import Cells, Chunks
from scripts.experiments.equal_compute_lib.model import Values
from scripts.experiments.equal_compute_lib.settings import Butterfly

Place = tuple[int, int, int]
"""Pair (its lower cell, the bit in which they differ) and fragment."""


def bit_of(window: int, fragment: int, num_bits: int) -> int:
    """The bit of the cell's number in which partners differ: (w + p) mod k."""
    return (window + fragment) % num_bits


def partner(cell: int, bit: int) -> int:
    """i XOR 2^b."""
    return cell ^ (1 << bit)


def half_way(own: Tensor, told: Tensor, heard: Tensor) -> Tensor:
    """θᵢ + ½(x̂ⱼ − x̂ᵢ): what one takes the other gives, so the pair's mean stays, whatever a codec loses.

    Args:
        own: θᵢ now.
        told: x̂ᵢ, what the partner decodes of this cell.
        heard: x̂ⱼ, what this cell decodes of the partner.
    """
    return torch.add(own, torch.mul(torch.sub(heard, told), 0.5))


@dataclass
class Flight:
    """A round between snapshot and apply: what every cell told."""

    window: int
    told: list[Chunks]


class ButterflyExchange:
    """2^k cells, in window w and fragment p paired by bit (w + p) mod k.

    Coded packets carry the difference from a reference that both partners know, R ← ½(x̂ᵢ + x̂ⱼ), and what the
    codec left out of a pair's last packet comes with its next. bf16 and fp32 carry the value itself.

    Args:
        values: (C, *shape) each, equal in all cells; written to in place.
        settings: of the exchange.
        steps: inner steps from here on.
        seed: of the codecs' random bits.
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
        self.num_bits = self._cells.num_cells.bit_length() - 1
        if self._cells.num_cells != 1 << self.num_bits or self.num_bits < 1:
            raise ValueError(f"{self._cells.num_cells} cells: a butterfly needs 2, 4, 8, …")
        self.schedule = Schedule(steps, settings.window, settings.fragments, settings.overlap)
        self._first = [self._cells.gather(0, p) for p in range(settings.fragments)]
        self._coded = settings.codec not in ("fp32", "bf16")
        self._reference: dict[Place, Chunks] = {}
        self._residual: dict[tuple[int, int, int], Chunks] = {}
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
        """k full-precision rounds over every fragment: all cells end with their mean."""
        for p in range(self._settings.fragments):
            for number in range(self.num_bits):
                self._resolve(p, self._begin(p, self.schedule.final_window + number))

    def _settle(self) -> None:
        for p, flight in enumerate(self._flights):
            if flight is not None and self.schedule.apply_step(p, flight.window) <= self._step:
                self._flights[p] = None
                self._resolve(p, flight)

    def _begin(self, p: int, window: int) -> Flight:
        exact = self.schedule.is_final(window)
        bit = bit_of(window, p, self.num_bits)
        told: list[Chunks] = []
        for cell in range(self._cells.num_cells):
            value = self._cells.gather(cell, p)
            told.append({})
            for chunk in self._cells.map.fragments[p].chunks:
                c = chunk.index
                if exact or not self._coded or chunk.exact:
                    told[cell][c] = self._cells.send(value[c], chunk, cell, window, exact=exact)
                    continue
                base = self._base(cell, bit, p)[c]
                left = self._residual.setdefault((cell, bit, p), {})
                owed = torch.sub(value[c], base)
                if c in left:
                    owed = torch.add(owed, left[c].mul(self._cells.beta))
                sent = self._cells.send(owed, chunk, cell, window, exact=False)
                left[c] = torch.sub(owed, sent)
                told[cell][c] = torch.add(base, sent)
        if not exact:
            for cell in range(self._cells.num_cells):
                other = partner(cell, bit)
                if cell < other:
                    mid = {c: told[cell][c].add(told[other][c]).mul(0.5) for c in told[cell]}
                    self._reference[(cell, bit, p)] = mid
        return Flight(window, told)

    def _base(self, cell: int, bit: int, p: int) -> Chunks:
        return self._reference.get((min(cell, partner(cell, bit)), bit, p), self._first[p])

    def _resolve(self, p: int, flight: Flight) -> None:
        bit = bit_of(flight.window, p, self.num_bits)
        for cell, told in enumerate(flight.told):
            heard = flight.told[partner(cell, bit)]
            local = self._cells.local(cell, p)
            own = dict(self._cells.scatter(p, told))
            for name, other in self._cells.scatter(p, heard):
                local[name].copy_(half_way(local[name], own[name], other))
