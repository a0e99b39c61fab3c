"""What the relay keeps of a round: while it is open, and once it is closed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Parts:
    """What one cell has put into one round."""

    tokens: int
    step: int
    hashes: dict[int, str] = field(default_factory=dict)
    """Chunk → hash of the packet."""


@dataclass
class OpenRound:
    """A round without a commit."""

    members: tuple[int, ...]
    version: int
    num_chunks: int
    first_at: float
    cells: dict[int, Parts] = field(default_factory=dict)

    def missing(self) -> tuple[int, ...]:
        """The members whose packets are not all there."""
        there = {cell for cell, parts in self.cells.items() if len(parts.hashes) == self.num_chunks}
        return tuple(cell for cell in self.members if cell not in there)


@dataclass(frozen=True)
class Base:
    """What a cell says that a chunk's packets build on."""

    base: str
    cell: int
    window: int


@dataclass(frozen=True)
class Closed:
    """A committed round."""

    seq: int
    version: int
    named: frozenset[int]


@dataclass
class Counts:
    """Commits of the present attempt."""

    committed: int = 0
    """Naming at least one cell."""
    empty: int = 0
    partial: int = 0
    """Naming some cells, not all."""
