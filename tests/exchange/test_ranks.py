"""A cell of two ranks (FSDP2, gloo) exchanges with a cell of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exchange.toy import Cell, MemoryRelay, same, together, toy_settings
from tests.exchange.toy_ranks import SPAWN, PairRelay, RelayManager, rank_main

KEY = b"only for this test"


@pytest.fixture
def manager() -> Iterator[RelayManager]:
    with RelayManager(authkey=KEY, ctx=SPAWN) as served:
        yield served


def two_ranks(
    manager: RelayManager, folder: Path, restart_at: int, *, poison: bool = False, mode: str = "two-site"
) -> list[dict[str, Any]]:
    store = str(folder / "store")
    arguments = (2, store, manager.address, KEY, restart_at, poison, mode)
    processes = [SPAWN.Process(target=rank_main, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(f"{store}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_and_one_end_with_the_bits_of_one_and_one(manager: RelayManager, tmp_path: Path) -> None:
    """Also over a checkpoint with a round in flight (snapshot at 9, apply at 11)."""
    one = Cell(manager.relay(), 1)  # type: ignore[attr-defined]
    ranks, _ = together(lambda: two_ranks(manager, tmp_path, 10), one.finish)
    one.island.close()
    assert isinstance(ranks, list)
    for told in ranks:
        assert "error" not in told, told
        assert same(told["values"], one.values())
        assert tuple(told["versions"]) == one.island.versions() == (4, 4)

    relay = MemoryRelay(2, 2)
    alone = [Cell(relay, 0), Cell(relay, 1)]
    together(*(cell.finish for cell in alone))
    for cell in alone:
        cell.island.close()
    assert same(alone[0].values(), ranks[0]["values"])
    assert ranks[0]["metrics"]["rounds_applied"] == 8
    assert ranks[0]["metrics"]["cosine"] == pytest.approx(alone[0].island.metrics()["cosine"])


@pytest.mark.slow
def test_two_ranks_and_one_as_a_pair(manager: RelayManager, tmp_path: Path) -> None:
    """Also over a checkpoint with a round in flight."""
    one = Cell(manager.pairs(), 1, toy_settings(mode="butterfly"))  # type: ignore[attr-defined]
    ranks, _ = together(lambda: two_ranks(manager, tmp_path, 10, mode="butterfly"), one.finish)
    one.island.close()
    assert isinstance(ranks, list)
    for told in ranks:
        assert "error" not in told, told
        assert same(told["values"], one.values())
        assert tuple(told["versions"]) == one.island.versions() == (5, 5)
    assert ranks[0]["metrics"]["distance"] == pytest.approx(one.island.metrics()["distance"])

    pairs = PairRelay()
    alone = [Cell(pairs, cell, toy_settings(mode="butterfly")) for cell in range(2)]
    together(*(cell.finish for cell in alone))
    for cell in alone:
        cell.island.close()
    assert same(alone[0].values(), ranks[0]["values"])


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_on_all(manager: RelayManager, tmp_path: Path) -> None:
    one = Cell(manager.relay(), 1)  # type: ignore[attr-defined]
    ranks, _ = together(lambda: two_ranks(manager, tmp_path, 10, poison=True), lambda: one.advance(8))
    one.island.close()
    assert isinstance(ranks, list)
    for told in ranks:
        assert told["error"].startswith(
            "NotFiniteError: cell 0, fragment 0, window 1: parameter 'blocks.2.experts.up' holds a value"
        )
