"""What goes wrong in a simulated run, and how often: drawn from a seed, so that a run can be played again."""

from __future__ import annotations

import math
from random import Random

JITTER = 0.02
"""Standard deviation of a window's pace, of one cell, relative (assumption)."""
STRAGGLER_SHARE = 0.01
"""Of a cell's windows in which something slows it down: a hot accelerator, a noisy neighbour (assumption)."""
STRAGGLER_SLOWER = (1.1, 2.0)
"""Times as long as such a window takes (assumption)."""
LINK_SHARES = (0.7, 1.0)
"""Share of the stated bandwidth that a window finds (assumption, as in the plan's ranges)."""
RELAY_DAYS = 30.0
"""Between two restarts of the relay (assumption)."""
RELAY_AWAY_S = 20.0
"""Until it answers again: the middle (assumption)."""
REGION_DAYS = 60.0
"""Between two outages of the place where the relay stands, if that is no site of the run (assumption, as
``failures.site``)."""
REGION_AWAY_S = 3600.0
"""Until it is back: the middle (assumption)."""
SIGMA = math.log(3) / 1.2816
"""Of the lognormal durations: one in ten takes three times the middle."""
POOL = 8191
"""Draws that are made once and used again from random places: a draw for each cell and window would take longer than
the simulation itself."""

WORDS = (
    f"pace of a window ± {JITTER:.0%}; one in {1 / STRAGGLER_SHARE:.0f} takes {STRAGGLER_SLOWER[0]:g} to "
    f"{STRAGGLER_SLOWER[1]:g} times as long",
    f"links at {LINK_SHARES[0]:.0%} to {LINK_SHARES[1]:.0%} of their bandwidth, another share each window",
    f"the relay is started anew once in {RELAY_DAYS:.0f} days and away for {RELAY_AWAY_S:.0f} s; one in ten for "
    "three times as long",
    "an outage of a site takes all its cells at once, and the relay if it stands there; any other place of the relay "
    f"has one in {REGION_DAYS:.0f} days, of {REGION_AWAY_S / 3600:.0f} h",
)
"""The assumptions, for people."""


class Chance:
    """The draws of one run.

    Args:
        num_cells: draws that ``paces`` and ``links`` give at a time.
    """

    def __init__(self, seed: int, num_cells: int) -> None:
        self._random = Random(seed)  # noqa: S311  # a simulation, no secret
        self._num = num_cells
        size = POOL + num_cells
        draws = [self._pace() for _ in range(POOL)]
        self._paces = [draws[index % POOL] for index in range(size)]
        shares = [1 / self._random.uniform(*LINK_SHARES) for _ in range(POOL)]
        self._links = [shares[index % POOL] for index in range(size)]

    def _pace(self) -> float:
        pace = max(0.9, 1 + JITTER * self._random.gauss(0, 1))
        if self._random.random() < STRAGGLER_SHARE:
            pace *= self._random.uniform(*STRAGGLER_SLOWER)
        return pace

    def paces(self) -> list[float]:
        """For each cell, times as long as planned that a step takes in this window."""
        start = self._random.randrange(POOL)
        return self._paces[start : start + self._num]

    def links(self) -> list[float]:
        """For each cell, times as long as planned that a transfer takes in this window."""
        start = self._random.randrange(POOL)
        return self._links[start : start + self._num]

    def after(self, mean_s: float) -> float:
        """Seconds until something happens that happens every ``mean_s`` seconds; never for 0."""
        return self._random.expovariate(1 / mean_s) if mean_s > 0 else math.inf

    def lasting(self, middle_s: float) -> float:
        """Seconds that something takes: half of the times less than ``middle_s``, one in ten three times that."""
        return middle_s * math.exp(SIGMA * self._random.gauss(0, 1))
