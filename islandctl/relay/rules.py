"""What differs between the modes: who takes part in a round, and what ties their packets together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from islandctl.config.exchange import Late
from islandctl.ledger.entries import Commit
from islandctl.ledger.packet import PacketHeader
from islandctl.ledger.pairs import Pairing

Key = tuple[int, int, int]
"""A round: fragment, window, lowest of the cells that take part."""
Scope = tuple[int, ...]
"""Packets of one scope build on the same: all of them name the same hashes."""


class Rule(Protocol):
    """One mode. All state is of the present attempt."""

    what: str
    """What packets build on."""
    partial: bool
    """Without the cells that are away a commit may name the others."""

    def begin(self, versions: Sequence[int]) -> None:
        """An attempt begins, with these versions of the fragments."""

    def members(self, cell: int, fragment: int, window: int) -> tuple[int, ...]:
        """The cells that take part in the cell's round, itself included, in order."""

    def pair(self, members: tuple[int, ...]) -> tuple[int, int] | None:
        """What the commit says of them."""

    def stale(self, header: PacketHeader) -> str:
        """Why the packet cannot count any more; empty: it can."""

    def scope(self, header: PacketHeader) -> Scope | None:
        """With which packets it must agree on what it builds; None: it is of the past."""

    def left_behind(self, fragment: int, version: int) -> bool:
        """Has the fragment moved on under an open round that builds on ``version``?"""

    def deadline_s(self, window: int) -> float | None:
        """After a round's first packet; None: it waits as long as it takes."""

    def version_after(self, fragment: int, window: int, *, named: bool) -> int:
        """The version that a commit leads to."""

    def recorded(self, commit: Commit) -> Scope | None:
        """A fact: the commit stands. Gives the scope that ends with it, if one does."""

    def binds(self, commit_version: int, fragment: int, *, named: bool) -> bool:
        """Do the packets of a committed round still bind later ones?"""


class SharedAnchor:
    """All cells take part, and build on one anchor. Its version counts the commits in it.

    Args:
        seeded: the rounds of window 0 are the first cell's alone: its values are where the others begin.
    """

    what = "anchor"
    partial = True

    def __init__(self, num_cells: int, late: Late, *, seeded: bool = False) -> None:
        self._all = tuple(range(num_cells))
        self._late = late
        self._seeded = seeded
        self._versions: list[int] = []

    def begin(self, versions: Sequence[int]) -> None:
        self._versions = list(versions)

    def members(self, cell: int, fragment: int, window: int) -> tuple[int, ...]:
        return self._all[:1] if self._seeded and window == 0 else self._all

    def pair(self, members: tuple[int, ...]) -> tuple[int, int] | None:
        return None

    def stale(self, header: PacketHeader) -> str:
        current = self._versions[header.fragment]
        same = header.version == current
        return "" if same else f"builds on version {header.version}, the anchor is at {current}"

    def scope(self, header: PacketHeader) -> Scope | None:
        return (header.fragment,) if header.version == self._versions[header.fragment] else None

    def left_behind(self, fragment: int, version: int) -> bool:
        return version != self._versions[fragment]

    def deadline_s(self, window: int) -> float | None:
        return None if self._seeded and window == 0 else self._late.deadline

    def version_after(self, fragment: int, window: int, *, named: bool) -> int:
        return self._versions[fragment] + named

    def recorded(self, commit: Commit) -> Scope | None:
        if commit.version == self._versions[commit.fragment]:
            return None
        self._versions[commit.fragment] = commit.version
        return (commit.fragment,)

    def binds(self, commit_version: int, fragment: int, *, named: bool) -> bool:
        return not named and commit_version == self._versions[fragment]


class Pairs:
    """Two cells take part, and build on the reference that only they share. Both count, or neither.

    A version is the number of windows behind it: of a packet its own window, of a commit the next one. The run's last
    rounds make all cells equal, so they are not given up at the first deadline: with ``then: wait`` never, with
    ``then: alone`` after as many deadlines as make a cell count as away.

    Args:
        final_window: the first window of the last rounds.
    """

    what = "reference"
    partial = False

    def __init__(self, num_cells: int, late: Late, final_window: int) -> None:
        self._pairing = Pairing(num_cells)
        self._late = late
        self._final_window = final_window
        self._begun: tuple[int, ...] = ()

    def begin(self, versions: Sequence[int]) -> None:
        self._begun = tuple(versions)

    def members(self, cell: int, fragment: int, window: int) -> tuple[int, ...]:
        return self._pairing.pair(cell, fragment, window)

    def pair(self, members: tuple[int, ...]) -> tuple[int, int] | None:
        lower, upper = members
        return lower, upper

    def stale(self, header: PacketHeader) -> str:
        first = self._begun[header.fragment]
        return "" if header.window >= first else f"this attempt began with window {first}"

    def scope(self, header: PacketHeader) -> Scope | None:
        return (header.fragment, header.window, self.members(header.cell, header.fragment, header.window)[0])

    def left_behind(self, fragment: int, version: int) -> bool:
        return False

    def deadline_s(self, window: int) -> float | None:
        if window < self._final_window:
            return self._late.deadline
        return self._late.deadline * self._late.windows if self._late.then == "alone" else None

    def version_after(self, fragment: int, window: int, *, named: bool) -> int:
        return window + 1

    def recorded(self, commit: Commit) -> Scope | None:
        assert commit.pair is not None
        return (commit.fragment, commit.window, commit.pair[0])

    def binds(self, commit_version: int, fragment: int, *, named: bool) -> bool:
        return False
