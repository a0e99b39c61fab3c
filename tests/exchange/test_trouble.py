"""Cells with the real relay's rules, while they die and lose the relay at random moments: the ends are always equal.

A failing seed is the test's name. Timing is real, so a seed fixes what is tried, not what comes of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from islandctl.config.recipe import Late
from islandctl.errors import UnreachableError
from islandctl.exchange import courier, follower
from islandctl.ledger.entries import Entry
from islandctl.relay.inprocess import InProcessRelay
from tests.exchange.toy import CONFIG, RUN, Cell, anchors, same, together, toy_settings

STEPS = 40


class Shaky:
    """A cell's way to the relay, cut for a while now and then."""

    def __init__(self, relay: InProcessRelay, cell: int) -> None:
        self._inner = relay.transport(cell)
        self.away_until = 0.0

    def _reach(self) -> None:
        if time.monotonic() < self.away_until:
            raise UnreachableError("relay away")

    def put(self, packet: bytes) -> None:
        self._reach()
        self._inner.put(packet)

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        self._reach()
        return self._inner.fetch(attempt, fragment, window, cell, chunk)

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        self._reach()
        return self._inner.entries(after, min(wait_s, 0.05))


class Life:
    """One cell from the first step to the last, through its deaths."""

    def __init__(self, relay: InProcessRelay, number: int, num_cells: int, seed: int, **settings: object) -> None:
        self.random = random.Random(seed * 100 + number)
        self.relay = relay
        self.transport = Shaky(relay, number)
        self.cell = Cell(
            relay, number, toy_settings(**settings), steps=STEPS, transport=self.transport, num_cells=num_cells
        )
        self.deaths = 0

    def run(self) -> Cell:
        saved = None
        self.cell.now = self.cell.island.resume()
        while self.cell.now < STEPS:
            dice = self.random.random()
            if dice < 0.1:
                saved = self.cell.save()
            elif dice < 0.17 and self.deaths < 3:
                self.deaths += 1
                self.cell = self.cell.reborn(saved, transport=self.transport)
            elif dice < 0.22:
                self.transport.away_until = time.monotonic() + self.random.random() / 2
            self.cell.advance(min(self.cell.now + 1, STEPS))
        return self.cell.finish()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_cells_end_equal_whatever_happened(seed: int) -> None:
    rolled = random.Random(seed)
    num_cells = rolled.choice([2, 2, 3])
    late = Late.model_validate({"deadline": "100 ms", "windows": 2, "then": ["alone", "wait"][seed % 2]})
    relay = InProcessRelay(RUN, CONFIG, [f"cell-{number}" for number in range(num_cells)], 2, late=late)
    lives = [
        Life(
            relay,
            number,
            num_cells,
            seed,
            when=["fixed", "arrival"][seed // 2 % 2],
            codec=["int8", "bf16"][seed // 4 % 2],
            late=late,
        )
        for number in range(num_cells)
    ]
    try:
        cells = together(*(life.run for life in lives))
    finally:
        for life in lives:
            life.cell.island.close()
    assert relay.status().halted == ""
    first, *others = cells
    assert isinstance(first, Cell)
    for other in others:
        assert isinstance(other, Cell)
        assert same(first.values(), other.values())
        assert same(anchors(first), anchors(other))
