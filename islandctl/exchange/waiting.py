"""How the ranks of a cell stand still together: until something has come on all of them, or none waits any more."""

from __future__ import annotations

from collections.abc import Callable

from islandctl.exchange.follower import Latch
from islandctl.exchange.ranks import Ranks

TICK_S = 1.0
"""While rank 0 waits it tells the others so this often; they would run into the group's timeout otherwise."""


class Waiting:
    """The waits of one rank.

    Args:
        ranks: the cell's.
        latch: what wakes a wait, and whose error ends it.
        alive: called at every turn of a wait, when all ranks have just been heard: this is no hang.
    """

    def __init__(self, ranks: Ranks, latch: Latch, alive: Callable[[], None] = lambda: None) -> None:
        self._ranks = ranks
        self._latch = latch
        self._alive = alive
        self.hurry = False
        """Do not wait any more: the process was asked to end. Any thread may set it."""

    def hurried(self) -> bool:
        """Whether any rank was asked to end; all know from then on. Collective."""
        if self._ranks.most([int(self.hurry)]) == [1]:
            self.hurry = True
        self._alive()
        return self.hurry

    def tick(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds on this rank, at most ``TICK_S``. It is evaluated at least once."""
        with self._latch.changed:
            self._latch.changed.wait_for(condition, timeout=TICK_S)

    def everywhere(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds on every rank. False: ``hurry`` came first. Collective.

        Raises:
            IslandError: the background's error, on all ranks.
        """
        while True:
            self.tick(lambda: condition() or self._latch.error is not None)
            self._ranks.agree(self._latch.error)
            missing, hurry = self._ranks.most([int(not condition()), int(self.hurry)])
            self._alive()
            if not missing:
                return True
            if hurry:
                self.hurry = True
                return False
