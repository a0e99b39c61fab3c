"""Every outer optimizer in whole runs: equal bits in all cells, and the same bits after a death."""

from __future__ import annotations

import pytest

from islandctl.config.exchange import Outer
from tests.exchange.toy import Cell, MemoryRelay, anchors, same, together, toy_settings

STEPS, DIES_AT = 40, 21
"""Three windows are done when it dies: ``delayed`` by 2 then holds one pseudo-gradient of each fragment."""


def run(outer: Outer, *, dies: bool) -> tuple[MemoryRelay, list[Cell]]:
    relay, settings = MemoryRelay(2, 2), toy_settings(outer=outer)
    one, two = (Cell(relay, number, settings, steps=STEPS) for number in (0, 1))

    def lives() -> Cell:
        if not dies:
            return one.finish()
        saved = one.advance(DIES_AT - 2).save()
        one.advance(DIES_AT)
        return one.reborn(saved).finish()

    again, _ = together(lives, two.finish)
    assert isinstance(again, Cell)
    for cell in (again, two):
        cell.island.close()
    return relay, [again, two]


@pytest.mark.parametrize(
    "outer",
    [Outer(), Outer(kind="average"), Outer(kind="delayed", delay=2), Outer(kind="delayed", delay=3)],
    ids=lambda outer: f"{outer.kind}-{outer.delay or 0}",
)
def test_a_death_between_two_moves_of_the_momentum_changes_nothing(outer: Outer) -> None:
    undisturbed, reference = run(outer, dies=False)
    relay, cells = run(outer, dies=True)
    assert same(cells[0].values(), cells[1].values())
    assert same(anchors(cells[0]), anchors(cells[1]))
    assert relay.packets == undisturbed.packets
    for cell, expected in zip(cells, reference, strict=True):
        assert same(cell.values(), expected.values())


def test_packets_say_what_the_outer_optimizer_remembers() -> None:
    """Equal anchors with unequal sums are not the same base: the next move of the momentum would part the cells."""
    relay = MemoryRelay(2, 2)
    cells = [
        Cell(relay, number, toy_settings(outer=Outer(kind="delayed", delay=3)), steps=STEPS) for number in (0, 1)
    ]
    together(*(lambda cell=cell: cell.advance(7) for cell in cells))
    before = [dict(cell.island._rounds.states[0].base) for cell in cells]
    assert before[0] == before[1]
    state = cells[1].island._rounds.states[0]
    state.outer[0] = state.outer[0] | {"sum": state.outer[0]["sum"] + 1}
    state.rehash()
    assert state.base[0] != before[0][0]
    for cell in cells:
        cell.island.close()
