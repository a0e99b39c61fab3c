"""Cells of unequal speed: how many steps of its own a cell takes in a window, and which of the run's they are.

The *run's* steps are the recipe's: what the schedule, the ledger and joint checkpoints count. Without torch, since a
plan needs it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, model_validator

from islandctl.config.exchange import Exchange
from islandctl.config.model import Model


class Pace(Model):
    """One cell's own steps against the run's.

    From one snapshot to the next (and from a window's begin to the first) a cell's own steps are spread evenly over
    the run's. Snapshots and windows' ends fall on whole steps of both. So all cells pass them in one order, and what
    is due between two snapshots in one cell is due between the same two in every cell.
    """

    window: int = Field(ge=1)
    """The run's steps in a window."""
    own: int = Field(ge=1)
    """The cell's."""
    fragments: int = Field(ge=1)
    warmup: int = Field(default=0, ge=0)
    """The run's steps before the first window. They are the first cell's own; the others only count along."""

    @classmethod
    def of(cls, exchange: Exchange, own: int | None) -> Pace:
        """Of a cell that takes ``own`` steps a window; None: as many as the recipe says."""
        return cls(
            window=exchange.window,
            own=exchange.window if own is None else own,
            fragments=exchange.fragments,
            warmup=exchange.warmup,
        )

    @model_validator(mode="after")
    def _a_step_a_fragment(self) -> Pace:
        if self.own < self.fragments:
            raise ValueError(f"{self.own} steps a window are fewer than {self.fragments} fragments")
        return self

    def own_step(self, step: int) -> int:
        """How many steps of its own the cell has done when it reaches the run's ``step`` for the first time."""
        if step <= self.warmup or self.own == self.window:
            return step
        windows, offset = divmod(step - self.warmup, self.window)
        # ⌊p·W/P⌋ < offset for this p and none above
        part = max(0, -(-offset * self.fragments // self.window) - 1)
        begin, own_begin, length, own_length = self._part(part)
        return self.warmup + windows * self.own + own_begin - (begin - offset) * own_length // length

    def run_step(self, own: int) -> int:
        """The run's step that the cell has reached with so many of its own."""
        return math.floor(self.position(own))

    def position(self, own: int) -> float:
        """The same with fractions, for what changes from step to step: the learning rate of a share of the run."""
        if own <= self.warmup or self.own == self.window:
            return own
        windows, offset = divmod(own - self.warmup, self.own)
        # ⌊p·own/P⌋ ≤ offset for this p and none above
        part = -(-(offset + 1) * self.fragments // self.own) - 1
        begin, own_begin, length, own_length = self._part(part)
        whole, rest = divmod((offset - own_begin) * length, own_length)
        return self.warmup + windows * self.window + begin + whole + rest / own_length

    def at(self, step: int) -> int:
        """The cell's own step at which it goes on from the run's ``step``: the first there, or, where its own steps
        leave that one out, the last before."""
        own = self.own_step(step)
        return own if self.run_step(own) == step else own - 1

    def reaches(self, step: int, own: int) -> bool:
        """Whether the cell's own step ``own`` is the one that reaches the run's ``step``, and no later one."""
        return self.run_step(own) == step and self.own_step(step) == own

    def windows(self, own: int) -> int:
        """Whole windows that are behind the cell."""
        return max(0, own - self.warmup) // self.own

    def _part(self, part: int) -> tuple[int, int, int, int]:
        """(begin, own begin, length, own length) of the part of a window that ends with fragment ``part``'s snapshot,
        counted from the window's begin."""
        begin, own_begin = part * self.window // self.fragments, part * self.own // self.fragments
        end, own_end = (part + 1) * self.window // self.fragments, (part + 1) * self.own // self.fragments
        return begin, own_begin, end - begin, own_end - own_begin


def middle_speed(steps_per_s: Sequence[float]) -> float:
    """The speed at which a cell takes ``exchange.window`` steps a window: the geometric mean, so that one cell twice
    as fast and one half as fast leave it where it is."""
    return math.exp(sum(map(math.log, steps_per_s)) / len(steps_per_s))


def pace_limits(exchange: Exchange) -> tuple[int, int]:
    """The fewest and the most steps of its own that a cell may take in a window; at least one a fragment."""
    window, bound = exchange.window, exchange.bound
    return max(math.ceil(window / bound), exchange.fragments), math.floor(window * bound)


def paced(steps_per_s: Sequence[float], exchange: Exchange) -> tuple[int, ...]:
    """Each cell's own steps a window, so that all end it together: in proportion to its speed, within the limits."""
    (least, most), middle = pace_limits(exchange), middle_speed(steps_per_s)
    return tuple(min(max(round(exchange.window * speed / middle), least), most) for speed in steps_per_s)
