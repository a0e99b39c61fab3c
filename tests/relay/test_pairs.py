"""Rounds of pairs: both count or neither, and nobody else waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.exchange import Late
from islandctl.errors import RelayError
from islandctl.ledger.chain import verify
from islandctl.ledger.entries import Commit, Halt
from islandctl.ledger.packet import digest
from islandctl.ledger.pairs import Pairing
from islandctl.relay.inprocess import InProcessRelay, MemoryArchive

from .builders import CONFIG, RUN, packet

DEADLINE_S, FINAL = 10.0, 6
Told = tuple[int, int, int, tuple[int, int], tuple[int, ...], str]


class World:
    """A relay of a butterfly with a clock of its own."""

    def __init__(self, num_cells: int = 4, then: str = "alone") -> None:
        self.now = 0.0
        self.cells = tuple(f"cell-{cell}" for cell in range(num_cells))
        self.late = Late.model_validate({"deadline": f"{DEADLINE_S} s", "windows": 2, "then": then})
        self.archive = MemoryArchive()
        self.restart()

    def restart(self) -> None:
        self.relay = InProcessRelay(
            RUN,
            CONFIG,
            self.cells,
            2,
            late=self.late,
            final_window=FINAL,
            archive=self.archive,
            clock=lambda: self.now,
        )

    def put(self, cell: int, fragment: int, window: int, chunk: int = 0, **changes: Any) -> None:
        changes.setdefault("version", window)
        self.relay.transport(cell).put(packet(cell, fragment, window, chunk, **changes))

    def code(self, action: Callable[[], object]) -> str:
        with pytest.raises(RelayError) as refused:
            action()
        return refused.value.code

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.relay.service.tick()

    @property
    def told(self) -> list[Told]:
        """fragment, window, version, pair, cells named, reason."""
        found = []
        for one in self.archive.ledger:
            if isinstance(one, Commit):
                assert one.pair is not None
                named = tuple(part.cell for part in one.named)
                found.append((one.fragment, one.window, one.version, one.pair, named, one.reason))
        return found

    def away(self) -> list[bool]:
        return [cell.away for cell in self.relay.status().cells]


def test_a_pair_is_committed_by_itself() -> None:
    world = World()
    world.put(2, 0, 0)
    world.put(0, 0, 0)
    assert world.told == []
    world.put(1, 0, 0)
    assert world.told == [(0, 0, 1, (0, 1), (0, 1), "complete")]
    reader = world.relay.transport(1)
    assert reader.fetch(1, 0, 0, 0, 0) == packet(0, 0, 0)
    assert world.code(lambda: reader.fetch(1, 0, 0, 2, 0)) == "early"
    world.put(3, 0, 0)
    assert world.told[-1] == (0, 0, 1, (2, 3), (2, 3), "complete")
    world.put(0, 0, 1)  # the next window pairs by the next bit
    world.put(2, 0, 1)
    assert world.told[-1] == (0, 1, 2, (0, 2), (0, 2), "complete")
    verify(world.archive.ledger)


def test_without_its_partner_nobody_is_named() -> None:
    world = World()
    world.put(0, 0, 0)
    world.after(DEADLINE_S)
    assert world.told == [(0, 0, 1, (0, 1), (), "deadline")]
    assert world.code(lambda: world.put(1, 0, 0)) == "closed"
    assert world.relay.status().rounds_empty == 1


def test_a_cell_that_is_away_is_skipped_at_once_and_paired_again() -> None:
    world = World(then="alone")
    for window in (0, 1):
        world.put(Pairing(4).partner(3, 0, window), 0, window)
        world.after(DEADLINE_S)
    assert world.away() == [False, False, False, True]
    world.put(2, 0, 2)
    assert world.told[-1] == (0, 2, 3, (2, 3), (), "alone")
    world.put(3, 0, 3)
    assert world.away() == [False] * 4
    world.put(1, 0, 3)
    assert world.told[-1] == (0, 3, 4, (1, 3), (1, 3), "complete")


def test_wait_keeps_the_pair_of_a_cell_that_is_away() -> None:
    world = World(then="wait")
    for window in (0, 1):
        world.put(Pairing(4).partner(3, 0, window), 0, window)
        world.after(DEADLINE_S)
    world.put(2, 0, 2)
    world.after(100 * DEADLINE_S)
    assert len(world.told) == 2
    world.put(3, 0, 2)
    assert world.told[-1] == (0, 2, 3, (2, 3), (2, 3), "complete")


@pytest.mark.parametrize(("then", "closed_after"), [("alone", 2 * DEADLINE_S), ("wait", None)])
def test_the_last_rounds_wait_longer(then: str, closed_after: float | None) -> None:
    world = World(then=then)
    world.put(0, 0, FINAL)
    world.after(2 * DEADLINE_S - 1)
    assert world.told == []
    world.after(1)
    assert len(world.told) == (0 if closed_after is None else 1)
    world.after(1000 * DEADLINE_S)
    if closed_after is None:
        world.put(1, 0, FINAL)
    assert world.told[-1][4] == ((0, 1) if closed_after is None else ())


def test_different_references_halt_the_run_and_name_both_partners() -> None:
    world = World()
    world.put(0, 1, 2, base="one")
    world.put(1, 1, 2, base="two")  # of the pair (1, 3): another reference is right
    assert world.code(lambda: world.put(2, 1, 2, base="three")) == "halted"
    halt = world.archive.ledger[-1]
    assert isinstance(halt, Halt)
    assert halt.reason.startswith("fragment 1, window 2, chunk 0: cells cell-2 and cell-0 (window 2) ")
    assert "different references" in halt.reason


def test_a_new_attempt_begins_behind_the_windows_that_it_knows() -> None:
    world = World(num_cells=2)
    for window in (0, 1):
        for cell in (0, 1):
            world.put(cell, 0, window)
    for cell in (0, 1):
        world.relay.transport(cell).register_checkpoint(10, f"m{cell}", (1, 0), 1)
    world.relay.rewind(10, ("m0", "m1"), (1, 0))
    world.restart()
    assert world.code(lambda: world.put(0, 0, 0, attempt=2)) == "stale"
    for cell in (0, 1):
        world.put(cell, 0, 1, attempt=2)
    assert world.told[-1] == (0, 1, 2, (0, 1), (0, 1), "complete")


PUT = st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 7), st.integers(0, 1))
EVENTS = st.lists(st.one_of(PUT, PUT, PUT, st.just(("late",)), st.just(("restart",))), max_size=50)


@given(EVENTS, st.sampled_from(["wait", "alone"]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_must_hold_in_every_run(events: list[tuple[Any, ...]], then: str) -> None:
    world = World(then=then)
    for event in events:
        if event[0] == "put":
            with contextlib.suppress(RelayError):
                world.put(*event[1:], num_chunks=2)
        elif event[0] == "late":
            world.after(DEADLINE_S)
        else:
            told, away, num_open = world.told, world.away(), world.relay.status().rounds_open
            world.restart()
            assert (world.told, world.away(), world.relay.status().rounds_open) == (told, away, num_open)
    assert len({told[:2] + told[3] for told in world.told}) == len(world.told), "a round was committed twice"
    for fragment, window, version, pair, named, _ in world.told:
        assert named in ((), pair)
        assert pair == Pairing(4).pair(pair[0], fragment, window)
        assert version == window + 1
    for one in world.archive.ledger:
        for part in one.named if isinstance(one, Commit) else ():
            for chunk, packet_hash in enumerate(part.chunks):
                place = (1, one.fragment, one.window, part.cell, chunk)
                assert digest(world.archive.packets[place]) == packet_hash
    verify(world.archive.ledger)
