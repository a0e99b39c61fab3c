"""Cells that take unequal numbers of steps in a window: one schedule, one anchor, weights by what each trains."""

from __future__ import annotations

import random

import pytest
import torch

from islandctl.config.exchange import Late
from islandctl.exchange import courier, follower
from tests.exchange.stress import Mishaps, Trouble, settings_of
from tests.exchange.test_trouble import seeds
from tests.exchange.toy import Cell, MemoryRelay, anchors, same, together, toy_parameters, toy_settings, train

PACES = (3, 12)
"""Of two cells, where the run has a window of 6 with 2 fragments and overlap 2."""
SNAPSHOTS, DUE = {3: (1, 3), 12: (6, 12)}, {3: (3, 4), 12: (10, 16)}
"""From a window's begin: own steps at which fragments 0 and 1 are taken, and at which their results are applied."""
WINDOWS = 3


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


class Dense:
    """The same by hand, in float64: whole tensors, no packets, no threads."""

    def __init__(self, fragments: list[list[str]]) -> None:
        self.fragments = fragments
        self.anchor = {name: value.detach().double() for name, value in toy_parameters().items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}
        self.values = [{name: value.clone() for name, value in self.anchor.items()} for _ in PACES]
        self.done, self.counted = [0, 0], [[0, 0], [0, 0]]
        self.tokens: list[tuple[int, int, list[int]]] = []

    def advance(self, cell: int, until: int) -> None:
        while self.done[cell] < until:
            self.done[cell] += 1
            train(self.values[cell], cell, self.done[cell])  # type: ignore[arg-type]

    def round(self, window: int, fragment: int) -> None:
        """Snapshots in both cells, the outer step, and the result, each at the cell's own step."""
        names, kept = self.fragments[fragment], []
        for cell, own in enumerate(PACES):
            self.advance(cell, window * own + SNAPSHOTS[own][fragment])
            kept.append({name: self.values[cell][name].clone() for name in names})
        tokens = [(self.done[cell] - self.counted[cell][fragment]) * (100 + cell) for cell in (0, 1)]
        self.tokens.append((window, fragment, tokens))
        for cell in (0, 1):
            self.counted[cell][fragment] = self.done[cell]
        self.pending = names, kept, tokens

    def apply(self, window: int, fragment: int, last: bool) -> None:
        names, kept, tokens = self.pending
        for cell, own in enumerate(PACES):
            due = window * own + DUE[own][fragment]
            self.advance(cell, min(due, WINDOWS * own) if last else due)
        for name in names:
            mean = sum(n * (self.anchor[name] - one[name]) for n, one in zip(tokens, kept, strict=True)) / sum(tokens)
            self.momentum[name] = 0.9 * self.momentum[name] + mean
            self.anchor[name] = self.anchor[name] - 0.7 * (mean + 0.9 * self.momentum[name])
            for cell in (0, 1):
                self.values[cell][name] = self.anchor[name] + (self.values[cell][name] - kept[cell][name])


def test_two_cells_share_one_anchor_weighed_by_what_each_has_trained() -> None:
    settings, relay = toy_settings(pace="measured", codec="fp32"), MemoryRelay(2, 2)
    cells = [Cell(relay, number, settings, steps=6 * WINDOWS, own=own) for number, own in enumerate(PACES)]
    dense = Dense([[one.name for one in each.placements] for each in cells[0].island.map.fragments])
    # no cell's step lies between a round's snapshots and its results in which another round begins
    for window in range(WINDOWS):
        for fragment in (0, 1):
            dense.round(window, fragment)
            dense.apply(window, fragment, last=window == WINDOWS - 1)
    together(*(cell.finish for cell in cells))
    assert [cell.now for cell in cells] == [own * WINDOWS for own in PACES]
    commits = relay.commits()
    regular = [(c.window, c.fragment, [n.tokens for n in c.named]) for c in commits if c.window < WINDOWS]
    assert regular == dense.tokens
    assert regular[:3] == [(0, 0, [100, 606]), (0, 1, [300, 1212]), (1, 0, [300, 1212])]
    assert all([n.step for n in c.named] == [c.window * 6 + 3 * (c.fragment + 1)] * 2 for c in commits[:-2])
    # the final rounds: the plain mean of what is left, by its tokens
    for fragment, names in enumerate(dense.fragments):
        tokens = [(dense.done[cell] - dense.counted[cell][fragment]) * (100 + cell) for cell in (0, 1)]
        weights = tokens if any(tokens) else [1, 1]
        for name in names:
            parts = [n * values[name] for n, values in zip(weights, dense.values, strict=True)]
            torch.testing.assert_close(cells[0].values()[name].double(), sum(parts) / sum(weights), rtol=0, atol=2e-6)
    assert same(cells[0].values(), cells[1].values())
    assert same(anchors(cells[0]), anchors(cells[1]))
    for cell in cells:
        cell.island.close()


def unequal(seed: int, mishaps: Mishaps, rolled: random.Random, **changes: object) -> Trouble:
    """Two or three cells whose paces are rolled, with every kind of settings."""
    settings = settings_of(rolled, pace="measured", **changes)
    window = settings.window
    settings = settings.model_copy(update={"warmup": window * (settings.warmup > 0)})
    least = max(settings.fragments, window // 2)
    owns = [rolled.randint(least, 2 * window) for _ in range(rolled.choice([2, 2, 3]))]
    steps = settings.warmup + window * rolled.choice([4, 6])
    return Trouble(seed, mishaps, settings=settings, num_cells=len(owns), steps=steps, every=window, owns=owns)


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_unequal_cells_end_equal_whatever_happened(seed: int) -> None:
    rolled = random.Random(seed)
    mishaps = Mishaps(
        kill=rolled.choice([0.0, 0.04]),
        term=rolled.choice([0.0, 0.02]),
        cut=rolled.choice([0.02, 0.05]),
        rewinds=rolled.choice([0, 1]),
        relay_restarts=rolled.choice([0, 2]),
        stops=rolled.choice([0, 1]),
    )
    unequal(seed, mishaps, rolled).run()


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_unequal_cells_that_were_killed_end_as_if_never_touched(seed: int) -> None:
    """Joint checkpoints are at windows' ends; deaths, stops, relay restarts and rewinds leave no bit otherwise."""
    patient = Late.model_validate({"deadline": "10 min", "windows": 2, "then": "wait"})
    mishaps = Mishaps(kill=0.04, term=0.03, rewinds=1, relay_restarts=1, stops=seed % 2)
    untouched, troubled = (
        unequal(seed, each, random.Random(seed), when="fixed", late=patient) for each in (Mishaps(), mishaps)
    )
    expected, found = untouched.run(), troubled.run()
    assert untouched.payloads() == troubled.payloads()
    for cell, reference in zip(found, expected, strict=True):
        assert same(cell.values(), reference.values())
        assert cell.now == cell.steps == reference.steps
