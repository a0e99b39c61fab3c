"""Rounds: when a commit is due and what it names, whatever comes late, twice, in another order, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.exchange import Late
from islandctl.errors import RelayError
from islandctl.ledger.chain import verify
from islandctl.ledger.entries import Commit, Entry, Halt
from islandctl.ledger.packet import digest
from islandctl.relay.inprocess import InProcessRelay, MemoryArchive
from islandctl.relay.service import Place

from .builders import CONFIG, RUN, packet

DEADLINE_S = 10.0


class World:
    """A relay with a clock of its own, which can be killed and started again on what it had stored."""

    def __init__(self, num_cells: int = 2, then: str = "wait", archive: MemoryArchive | None = None) -> None:
        self.now = 0.0
        self.cells = tuple(f"cell-{cell}" for cell in range(num_cells))
        self.late = Late.model_validate({"deadline": f"{DEADLINE_S} s", "windows": 2, "then": then})
        self.archive = archive or MemoryArchive()
        self.revive()

    def restart(self) -> None:
        self.relay = InProcessRelay(
            RUN, CONFIG, self.cells, 2, late=self.late, archive=self.archive, clock=lambda: self.now
        )

    def revive(self) -> None:
        """As a supervisor does: also when the relay is killed again while it recovers."""
        alive = False
        while not alive:
            with contextlib.suppress(Killed):
                self.restart()
                alive = True

    def put(self, cell: int, *place: int, **changes: object) -> None:
        self.relay.transport(cell).put(packet(cell, *place, **changes))  # type: ignore[arg-type]

    def code(self, action: Callable[[], object]) -> str:
        with pytest.raises(RelayError) as refused:
            action()
        return refused.value.code

    def pass_deadline(self) -> None:
        self.now += 2 * DEADLINE_S
        self.relay.service.tick()

    @property
    def ledger(self) -> list[Entry]:
        return self.archive.ledger

    @property
    def commits(self) -> list[Commit]:
        return [entry for entry in self.ledger if isinstance(entry, Commit)]

    @property
    def told(self) -> list[tuple[int, int, int, tuple[int, ...], str]]:
        """fragment, window, version, cells named, reason."""
        return [
            (one.fragment, one.window, one.version, tuple(part.cell for part in one.named), one.reason)
            for one in self.commits
        ]

    def version(self, fragment: int) -> int:
        return next((one.version for one in reversed(self.commits) if one.fragment == fragment), 0)

    def away(self) -> list[bool]:
        return [cell.away for cell in self.relay.status().cells]


def test_a_commit_names_every_chunk_in_order_whatever_order_they_came_in() -> None:
    world = World()
    for cell, chunk in [(1, 2), (0, 1), (1, 0), (0, 0), (0, 2), (1, 1)]:
        assert world.told == []
        world.put(cell, 0, 0, chunk, num_chunks=3, tokens=50 + cell)
    (commit,) = world.commits
    assert world.told == [(0, 0, 1, (0, 1), "complete")]
    for part in commit.named:
        assert part.tokens == 50 + part.cell
        assert part.chunks == tuple(
            digest(packet(part.cell, 0, 0, chunk, num_chunks=3, tokens=50 + part.cell)) for chunk in range(3)
        )


def test_refusals() -> None:
    world = World()
    world.put(0)
    world.put(0)
    assert world.code(lambda: world.put(0, payload=b"other")) == "exists"
    assert world.code(lambda: world.put(1, version=1)) == "stale"
    assert world.code(lambda: world.put(1, attempt=2)) == "stale"
    assert world.code(lambda: world.put(1, run="other")) == "foreign"
    assert world.code(lambda: world.put(1, config_hash="other")) == "foreign"
    assert world.code(lambda: world.put(1, 2)) == "invalid"
    assert world.code(lambda: world.put(1, num_chunks=2)) == "invalid"
    assert world.code(lambda: world.put(0, 1, 0, 5, num_chunks=5)) == "invalid"
    world.pass_deadline()
    assert world.code(lambda: world.put(1)) == "closed"
    world.put(0)
    assert world.code(lambda: world.put(0, payload=b"other")) == "exists"
    assert world.told == [(0, 0, 0, (), "deadline")]


def test_chunks_of_two_lives_of_a_cell_count_with_the_larger_tokens() -> None:
    """It died after its first chunk and came back another way: seen as a refusal that no restart could get over."""
    world = World()
    world.put(1, 0, 0, 0, num_chunks=2, tokens=9)
    world.put(0, 0, 0, 0, num_chunks=2, tokens=11, step=50)
    world.restart()
    world.put(0, 0, 0, 1, num_chunks=2, tokens=10, step=51)
    world.put(1, 0, 0, 1, num_chunks=2, tokens=9)
    (commit,) = world.commits
    assert [(part.tokens, part.step) for part in commit.named] == [(11, 51), (9, 50)]


def test_different_anchors_halt_the_run_and_name_both_cells() -> None:
    world = World()
    world.put(0, 1, 4, base="one")
    assert world.code(lambda: world.put(1, 1, 4, base="two")) == "halted"
    halt = world.ledger[-1]
    assert isinstance(halt, Halt)
    assert (halt.fragment, halt.window) == (1, 4)
    for word in ("fragment 1, window 4, chunk 0", "cell-0", "cell-1"):
        assert word in halt.reason
    assert world.code(lambda: world.put(0)) == "halted"
    world.restart()
    assert world.code(lambda: world.put(0)) == "halted"
    world.pass_deadline()
    assert world.told == []


def test_an_anchor_is_remembered_over_an_empty_round_and_a_restart() -> None:
    world = World()
    world.put(0, base="one")
    world.pass_deadline()
    world.restart()
    assert world.code(lambda: world.put(1, 0, 1, base="two")) == "halted"


def test_a_new_version_has_a_new_anchor() -> None:
    world = World()
    for cell in (0, 1):
        world.put(cell, base="one")
    for cell in (0, 1):
        world.put(cell, 0, 1, version=1, base="two")
    assert world.told[-1] == (0, 1, 2, (0, 1), "complete")


def test_wait_keeps_rounds_open_while_a_cell_is_away() -> None:
    world = World(then="wait")
    for window in (0, 1):
        world.put(0, 0, window)
        world.pass_deadline()
    assert world.away() == [False, True]
    world.put(0, 0, 2)
    world.pass_deadline()
    assert [one[:2] for one in world.told] == [(0, 0), (0, 1)]
    world.put(1, 0, 2)
    assert world.told[-1] == (0, 2, 1, (0, 1), "complete")
    assert world.away() == [False, False]


def test_alone_goes_on_at_once_and_takes_the_cell_back() -> None:
    world = World(num_cells=3, then="alone")
    for window in (0, 1):
        for cell in (0, 1):
            world.put(cell, 0, window)
        world.pass_deadline()
    assert world.away() == [False, False, True]
    world.put(0, 0, 2)
    world.put(1, 0, 2)
    assert world.told[-1] == (0, 2, 1, (0, 1), "alone")
    assert world.code(lambda: world.put(2, 0, 3, version=0)) == "stale"
    assert world.away()[2]
    world.put(2, 0, 3, version=1)
    assert world.away() == [False, False, False]
    world.put(0, 0, 3, version=1)
    world.put(1, 0, 3, version=1)
    assert world.told[-1] == (0, 3, 2, (0, 1, 2), "complete")


def test_alone_still_waits_for_cells_that_are_not_away() -> None:
    world = World(num_cells=3, then="alone")
    for window in (0, 1):
        world.put(0, 0, window)
        world.put(1, 0, window)
        world.pass_deadline()
    world.put(0, 0, 2)
    world.pass_deadline()
    assert world.told[-1] == (0, 2, 0, (), "deadline")


def test_fragments_of_one_window_count_as_one_missed_window() -> None:
    world = World(then="alone")
    for fragment in (0, 1):
        world.put(0, fragment, 0)
    world.pass_deadline()
    assert len(world.commits) == 2
    assert world.away() == [False, False]


def test_a_packet_in_between_begins_the_count_anew() -> None:
    world = World(then="alone")
    for window in (0, 1, 2):
        version = world.version(0)
        if window == 1:
            world.put(1, 0, window, version=version)
        world.put(0, 0, window, version=version)
        world.pass_deadline()
    assert len(world.commits) == 3
    assert world.away() == [False, False]


def test_a_round_left_behind_by_the_anchor_is_closed_empty() -> None:
    world = World()
    world.put(0, 0, 0)
    for cell in (0, 1):
        world.put(cell, 0, 1)
    assert world.told == [(0, 1, 1, (0, 1), "complete"), (0, 0, 1, (), "deadline")]


def test_a_rewind_drops_open_rounds_and_sets_versions() -> None:
    world = World()
    for cell in (0, 1):
        world.put(cell)
        world.relay.transport(cell).register_checkpoint(10, f"m{cell}", (1, 0), 1)
    for cell in (0, 1):
        world.put(cell, 0, 1, version=1)
    world.put(0, 1, 1)
    world.relay.rewind(10, ("m0", "m1"), (1, 0))
    for restart in (False, True):
        if restart:
            world.restart()
        status = world.relay.status()
        assert (status.attempt, status.rounds_open, status.rounds_committed) == (2, 0, 0)
    world.pass_deadline()
    assert len(world.commits) == 2
    for cell in (0, 1):
        world.put(cell, 0, 1, attempt=2, version=1)
    assert world.told[-1] == (0, 1, 2, (0, 1), "complete")


def test_what_an_attempt_left_undecided_stays_unread_by_others() -> None:
    world = World()
    world.put(0)
    world.relay.rewind(0, (), (0, 0))
    asia = world.relay.transport(1)
    assert world.code(lambda: asia.fetch(1, 0, 0, 0, 0)) == "stale"
    assert world.code(lambda: asia.fetch(2, 0, 0, 0, 0)) == "early"
    assert world.relay.transport(0).fetch(1, 0, 0, 0, 0) == packet(0)


def test_checkpoints_are_refused_after_a_halt_and_from_an_old_attempt() -> None:
    world = World()
    usa = world.relay.transport(0)
    first = usa.register_checkpoint(10, "m", (0, 0), 1)
    assert usa.register_checkpoint(10, "m", (0, 0), 1) == first
    assert world.code(lambda: usa.register_checkpoint(10, "m", (0,), 1)) == "invalid"
    assert world.code(lambda: usa.register_checkpoint(10, "m", (0, 0), 2)) == "stale"
    usa.halt("enough")
    assert world.code(lambda: usa.register_checkpoint(20, "m", (0, 0), 1)) == "halted"


def test_stop_and_halt_stand_once_an_attempt() -> None:
    world = World()
    assert world.relay.stop("first") == world.relay.stop("second")
    assert world.relay.transport(0).halt("a") == world.relay.transport(1).halt("b")
    assert world.relay.status().stopping
    world.relay.rewind(0, (), (0, 0))
    status = world.relay.status()
    assert (status.stopping, status.halted) == (False, "")


class Killed(Exception):
    """The relay's process ends here."""


class FragileArchive(MemoryArchive):
    """Kills the relay at chosen writes: just before the write (even numbers) or just after it (odd ones)."""

    def __init__(self, kills: set[int]) -> None:
        super().__init__()
        self._kills = set(kills)
        self._moment = 0
        self.packets = FragilePackets(self)

    def write(self, what: Callable[[], object]) -> None:
        self._pass()
        what()
        self._pass()

    def _pass(self) -> None:
        self._moment += 1
        if self._moment in self._kills:
            raise Killed

    def append(self, entry: Entry) -> None:
        self.write(lambda: super(FragileArchive, self).append(entry))


class FragilePackets(dict[Place, bytes]):
    def __init__(self, archive: FragileArchive) -> None:
        super().__init__()
        self._archive = archive

    def setdefault(self, place: Place, content: bytes) -> bytes:  # type: ignore[override]
        self._archive.write(lambda: super(FragilePackets, self).setdefault(place, content))
        return content


PUT = st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 1), st.integers(0, 4), st.integers(0, 1))
EVENTS = st.lists(st.one_of(PUT, PUT, PUT, st.just(("deadline",))), max_size=40)


def put_once(world: World, cell: int, fragment: int, window: int, chunk: int, version: int) -> str:
    try:
        world.put(cell, fragment, window, chunk, version=version, num_chunks=2)
    except RelayError as refused:
        return refused.code
    return "stored"


def play(events: list[tuple[Any, ...]], then: str, kills: set[int]) -> World:
    """Puts in any order, some twice, some never; deadlines in between; the relay killed at some of its writes.

    Who gets no answer asks again, as the client does.
    """
    world = World(num_cells=3, then=then, archive=FragileArchive(kills))
    for event in events:
        again = True
        version = world.version(event[2]) if event[0] == "put" else 0
        while again:
            try:
                if event[0] == "put":
                    assert put_once(world, *event[1:], version=version) in {"stored", "closed", "stale", "exists"}
                else:
                    world.pass_deadline()
                again = False
            except Killed:
                world.revive()
    return world


@given(EVENTS, st.sampled_from(["wait", "alone"]), st.sets(st.integers(1, 200), max_size=30))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_relay_killed_at_any_write_commits_the_same(
    events: list[tuple[Any, ...]], then: str, kills: set[int]
) -> None:
    straight, broken = play(events, then, set()), play(events, then, kills)
    assert straight.told == broken.told
    assert straight.away() == broken.away()
    assert straight.relay.status().rounds_open == broken.relay.status().rounds_open
    assert straight.archive.packets == broken.archive.packets
    verify(broken.ledger)


@given(EVENTS, st.sampled_from(["wait", "alone"]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_must_hold_in_every_run(events: list[tuple[Any, ...]], then: str) -> None:
    world = play(events, then, set())
    rounds = [(one.fragment, one.window) for one in world.commits]
    assert len(rounds) == len(set(rounds)), "a round was committed twice"
    for fragment in (0, 1):
        versions = [0, *(one.version for one in world.commits if one.fragment == fragment)]
        named = [bool(one.named) for one in world.commits if one.fragment == fragment]
        assert [after - before for before, after in pairwise(versions)] == named
    for one in world.commits:
        assert one.named or one.missing
        if one.named:
            assert sorted([part.cell for part in one.named] + list(one.missing)) == [0, 1, 2]
        for part in one.named:
            for chunk, packet_hash in enumerate(part.chunks):
                stored = world.archive.packets[1, one.fragment, one.window, part.cell, chunk]
                assert digest(stored) == packet_hash
    for place in world.archive.packets:
        reader = world.relay.transport((place[3] + 1) % 3)
        if (place[1], place[2]) in rounds:
            assert reader.fetch(*place)
        else:
            assert world.code(partial(reader.fetch, *place)) == "early"
        assert world.relay.transport(place[3]).fetch(*place)
