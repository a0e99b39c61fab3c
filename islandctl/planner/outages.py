"""When the relay of a simulated run is away: restarted, or gone with the region that it stands in."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from islandctl.planner.chance import REGION_AWAY_S, REGION_DAYS, RELAY_AWAY_S, RELAY_DAYS, Chance

DAY_S = 86_400.0


class RelayTimes:
    """The relay's absences, drawn as far as anybody has asked.

    Args:
        region: whether the place where it stands has outages of its own; otherwise it is one of the sites, and goes
            with that (``gone``).
    """

    def __init__(self, chance: Chance, *, region: bool) -> None:
        self._chance, self._region = chance, region
        self._absences: list[tuple[float, float]] = []
        """(to, from), in order."""
        self._drawn = 0.0
        """Until then all are known."""

    def gone(self, start: float, end: float) -> None:
        """Its site has an outage in this time."""
        insort(self._absences, (end, start))

    def between(self, start: float, end: float) -> tuple[float, float] | None:
        """(from, to) of the first absence that lies in this time, or reaches into it."""
        while self._drawn <= end:
            restart = self._chance.after(RELAY_DAYS * DAY_S)
            outage = self._chance.after(REGION_DAYS * DAY_S) if self._region else math.inf
            self._drawn += min(restart, outage)
            lasts = self._chance.lasting(RELAY_AWAY_S if restart <= outage else REGION_AWAY_S)
            insort(self._absences, (self._drawn + lasts, self._drawn))
        at = bisect_left(self._absences, (start, 0.0))
        to, since = self._absences[at] if at < len(self._absences) else (math.inf, math.inf)
        return (since, to) if since <= end else None

    def written(self, commit: float) -> tuple[float, float | None]:
        """When a commit is written for which all is there at ``commit``; and since when the relay is away, if so."""
        gone = self.between(commit, commit)
        return (commit, None) if gone is None else (gone[1], gone[0])

    def num_until(self, end: float) -> int:
        """Absences that began before ``end``."""
        return sum(since < end for _, since in self._absences)
