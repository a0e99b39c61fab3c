"""Where the relay stands best: a round with it beside each of the sites, against where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from islandctl.config.site import SiteProfile
from islandctl.config.units import seconds_text
from islandctl.planner.plan import CellPlan, Finding, RelayPlace
from islandctl.planner.wan import Link

INSIDE_RTT_S = 1e-3
"""Between a site's nodes and a relay beside them (assumption)."""
INSIDE_BYTES_PER_S = 3e9
"""The same, of one cell (assumption: 25 Gbit/s)."""
WORTH = 0.9
"""Share of the present round's time from which another place deserves a word."""


def relay_places(
    sites: Mapping[str, SiteProfile], cells: Sequence[CellPlan], links: Mapping[str, Link], size: int, partners: int
) -> tuple[RelayPlace, ...]:
    """The best place first. A relay beside a site serves all others over that site's WAN.

    Args:
        size: bytes of the largest fragment.
        partners: cells whose packets a cell fetches.
    """
    ways = [
        (links[cell.name].up_bytes_per_s, links[cell.name].down_bytes_per_s, links[cell.name].rtt_s) for cell in cells
    ]
    found = [RelayPlace(place="here", round_s=_round(ways, size, partners), bounded=False)]
    for name, beside in sites.items():
        ways, bounded = [], False
        far = sum(cell.site != name for cell in cells)
        for cell in cells:
            link = links[cell.name]
            if cell.site == name:
                ways.append((INSIDE_BYTES_PER_S, INSIDE_BYTES_PER_S, INSIDE_RTT_S))
                continue
            rtt = _between(sites, cell.site, name)
            bounded |= rtt is None
            # all far cells share the host's own line
            up = min(sites[cell.site].wan.up / 8, beside.wan.down / 8 / far, link.limit_bytes_per_s or float("inf"))
            down = min(sites[cell.site].wan.down / 8, beside.wan.up / 8 / far, link.limit_bytes_per_s or float("inf"))
            ways.append((up, down, beside.wan.rtt + link.rtt_s if rtt is None else rtt))
        found.append(RelayPlace(place=name, round_s=_round(ways, size, partners), bounded=bounded))
    return tuple(sorted(found, key=lambda one: one.round_s))


def _between(sites: Mapping[str, SiteProfile], one: str, other: str) -> float | None:
    told = sites[one].wan.to.get(other)
    return sites[other].wan.to.get(one) if told is None else told


def _round(ways: Sequence[tuple[float, float, float]], size: int, partners: int) -> float:
    """Seconds from all snapshots until the last cell has the result: as ``wan.round_time``."""
    commit = max(size / up + rtt for up, _, rtt in ways)
    return commit + max(partners * size / down + 1.5 * rtt for _, down, rtt in ways)


def relay_finding(places: Sequence[RelayPlace]) -> Finding | None:
    """A better place, when there is one."""
    here = next((one for one in places if one.place == "here"), None)
    if here is None or places[0].round_s > WORTH * here.round_s:
        return None
    best = places[0]
    text = (
        f"beside {best.place} a round would take {'at most ' if best.bounded else ''}{seconds_text(best.round_s)}, "
        f"where it is {seconds_text(here.round_s)}"
    )
    return Finding(level="ok", place="relay", text=text, hint=f"set relay.host to a host of {best.place}")
