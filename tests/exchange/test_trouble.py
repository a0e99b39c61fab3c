"""Cells with the real relay's rules, while they die and lose the relay at random moments: the ends are always equal.

A failing seed is the test's name. See ``stress.py`` for how to try more seeds.
"""

from __future__ import annotations

import os
import random

import pytest

from islandctl.config.exchange import Exchange, Late
from islandctl.exchange import courier, follower
from tests.exchange.stress import Mishaps, Trouble, settings_of
from tests.exchange.toy import same


def seeds(num_fast: int, num_slow: int) -> list[object]:
    """A few for every run of the suite, more for the slow one, or what ``ISLANDCTL_SEEDS=FIRST:END`` says."""
    asked = os.environ.get("ISLANDCTL_SEEDS")
    if asked:
        first, _, end = asked.partition(":")
        return list(range(int(first), int(end)))
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_fast, num_fast + num_slow)]
    return [*range(num_fast), *slow]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_cells_end_equal_whatever_happened(seed: int) -> None:
    rolled = random.Random(seed)
    mishaps = Mishaps(
        kill=rolled.choice([0.0, 0.03, 0.06]),
        term=rolled.choice([0.0, 0.02]),
        cut=rolled.choice([0.03, 0.08]),
        slow=rolled.choice([0.0, 0.2]),
        rewinds=rolled.choice([0, 0, 1, 2]),
        relay_restarts=rolled.choice([0, 1, 3]),
        stops=rolled.choice([0, 0, 1]),
    )
    settings = settings_of(rolled)
    first, *others = Trouble(seed, mishaps, settings=settings, num_cells=rolled.choice([2, 2, 3])).run()
    assert others
    assert all(same(first.values(), other.values()) for other in others)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_what_was_killed_ends_as_if_never_touched(seed: int) -> None:
    """Deaths, stops, relay restarts and rewinds, but no lost connection: weights and packets are the same bits."""
    rolled = random.Random(seed)
    patient = Late.model_validate({"deadline": "10 min", "windows": 2, "then": rolled.choice(["alone", "wait"])})
    settings = settings_of(rolled, when="fixed", late=patient)
    mishaps = Mishaps(
        kill=rolled.choice([0.03, 0.06]),
        term=rolled.choice([0.0, 0.05]),
        slow=rolled.choice([0.0, 0.1]),
        rewinds=rolled.choice([0, 1, 2]),
        relay_restarts=rolled.choice([0, 1, 3]),
        stops=rolled.choice([0, 1]),
    )
    untouched, troubled = Trouble(seed, Mishaps(), settings=settings), Trouble(seed, mishaps, settings=settings)
    expected, found = untouched.run(), troubled.run()
    assert untouched.payloads() == troubled.payloads()
    for cell, reference in zip(found, expected, strict=True):
        assert same(cell.values(), reference.values())


def butterfly(rolled: random.Random, then: str, deadline: str, **changes: object) -> Exchange:
    late = Late.model_validate({"deadline": deadline, "windows": rolled.choice([1, 2]), "then": then})
    return settings_of(rolled, mode="butterfly", apply="carry", warmup=0, late=late, **changes)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_pairs_end_equal_whatever_happened(seed: int) -> None:
    """With ``then: alone`` a cell can miss the last rounds: then nothing may hang, halt or disagree."""
    rolled = random.Random(seed)
    then = rolled.choice(["wait", "wait", "alone"])
    mishaps = Mishaps(
        kill=rolled.choice([0.0, 0.03, 0.06]),
        term=rolled.choice([0.0, 0.02]),
        cut=rolled.choice([0.01, 0.03]),
        slow=rolled.choice([0.0, 0.2]),
        rewinds=rolled.choice([0, 0, 1, 2]),
        relay_restarts=rolled.choice([0, 1, 3]),
        stops=rolled.choice([0, 0, 1]),
    )
    settings = butterfly(rolled, then, "150 ms")
    cells = Trouble(seed, mishaps, settings=settings, num_cells=rolled.choice([2, 4, 4])).run(equal=then == "wait")
    assert len(cells) >= 2


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_pairs_that_were_killed_end_as_if_never_touched(seed: int) -> None:
    rolled = random.Random(seed)
    settings = butterfly(rolled, rolled.choice(["alone", "wait"]), "10 min", when="fixed")
    num_cells = rolled.choice([2, 4, 8])
    mishaps = Mishaps(
        kill=rolled.choice([0.02, 0.04]),
        term=rolled.choice([0.0, 0.05]),
        slow=rolled.choice([0.0, 0.1]),
        rewinds=rolled.choice([0, 1, 2]),
        relay_restarts=rolled.choice([0, 1, 3]),
        stops=rolled.choice([0, 1]),
    )
    untouched = Trouble(seed, Mishaps(), settings=settings, num_cells=num_cells)
    troubled = Trouble(seed, mishaps, settings=settings, num_cells=num_cells)
    expected, found = untouched.run(), troubled.run()
    assert untouched.payloads() == troubled.payloads()
    for cell, reference in zip(found, expected, strict=True):
        assert same(cell.values(), reference.values())
