"""How the ranks of a cell stand still together."""

from __future__ import annotations

import pytest

from islandctl.exchange import waiting
from islandctl.exchange.follower import Latch
from islandctl.exchange.ranks import Ranks


def test_a_wait_that_is_meant_shows_that_it_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TICK_S", 0.001)
    signs: list[int] = []
    wait = waiting.Waiting(Ranks(None), Latch(), lambda: signs.append(len(signs)))
    assert wait.everywhere(lambda: len(signs) >= 5)
    assert len(signs) >= 5
    before = len(signs)
    assert not wait.hurried()
    assert len(signs) == before + 1
