"""A run that begins with a warm-up: window 0 is the first cell's alone."""

from __future__ import annotations

import pytest

from islandctl.config.exchange import Late
from islandctl.errors import RelayError
from islandctl.ledger.entries import Commit
from islandctl.relay.inprocess import InProcessRelay, MemoryArchive

from .builders import CELLS, CONFIG, RUN, packet


class World:
    """A relay with a clock of its own, and a late policy that gives up at once."""

    def __init__(self, archive: MemoryArchive | None = None) -> None:
        self.now = 0.0
        late = Late.model_validate({"deadline": "1 s", "windows": 1, "then": "alone"})
        self.relay = InProcessRelay(
            RUN, CONFIG, CELLS, 2, late=late, seeded=True, archive=archive, clock=lambda: self.now
        )

    def put(self, cell: int, *place: int, version: int = 0, num_chunks: int = 1) -> None:
        self.relay.transport(cell).put(packet(cell, *place, version=version, num_chunks=num_chunks))

    @property
    def commits(self) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], str]]:
        """fragment, window, version, cells named, cells missing, reason."""
        return [
            (one.fragment, one.window, one.version, tuple(part.cell for part in one.named), one.missing, one.reason)
            for one in self.relay.archive.ledger
            if isinstance(one, Commit)
        ]


def test_the_seed_is_committed_with_the_first_cells_last_chunk_and_nobody_is_missed() -> None:
    world = World()
    world.put(0, 1, 0, 0, num_chunks=2)
    world.now = 1e6
    world.relay.service.tick()
    assert world.commits == []  # a large model may be long on its way
    world = World(world.relay.archive)
    world.put(0, 1, 0, 1, num_chunks=2)
    assert world.commits == [(1, 0, 1, (0,), (), "complete")]
    assert not any(cell.away for cell in world.relay.status().cells)


def test_regular_windows_have_their_deadline() -> None:
    world = World()
    world.put(0, 0, 0)
    world.put(0, 0, 1, version=1)
    world.now = 2.0
    world.relay.service.tick()
    assert world.commits[-1] == (0, 1, 1, (), (1,), "deadline")


def test_no_other_cell_takes_part_in_the_seed() -> None:
    world = World()
    with pytest.raises(RelayError, match="the warm-up belongs to cell usa alone") as refused:
        world.put(1, 0, 0)
    assert refused.value.code == "invalid"
