"""Sites of unequal speed: local batches, or local steps a window, with which all end a window together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from islandctl.config.exchange import Exchange
from islandctl.config.pace import paced
from islandctl.config.units import seconds_text
from islandctl.planner.pace import UNEQUAL
from islandctl.planner.plan import CellPlan, CellShare, Finding

MOST_NAMED = 4


def balanced(
    cells: Sequence[CellPlan],
    steps_s: Sequence[float],
    *,
    batch: int,
    exchange: Exchange,
    planned: Callable[[CellPlan, int], float],
) -> tuple[CellShare, ...]:
    """Batches in proportion to speed, then moved one sharing of the ranks at a time from the slowest cell to the
    fastest as long as that helps. Empty where the cells are about equally fast.

    Args:
        steps_s: seconds of a step of every cell with ``batch``.
        planned: seconds of a step of a cell with another batch.
    """
    fastest = min(steps_s)
    if max(steps_s) <= UNEQUAL * fastest:
        return ()
    speeds = [1 / seconds for seconds in steps_s]
    whole = batch * len(cells)
    sizes = [
        max(1, round(whole * speed / sum(speeds) / cell.num_ranks)) * cell.num_ranks
        for cell, speed in zip(cells, speeds, strict=True)
    ]
    times = [planned(cell, size) for cell, size in zip(cells, sizes, strict=True)]
    for _ in range(8 * len(cells)):
        slow, fast = times.index(max(times)), times.index(min(times))
        less = sizes[slow] - cells[slow].num_ranks
        if less < cells[slow].num_ranks:
            break
        lightened, loaded = planned(cells[slow], less), planned(cells[fast], sizes[fast] + cells[fast].num_ranks)
        if max(lightened, loaded) >= times[slow]:
            break
        sizes[slow], sizes[fast] = less, sizes[fast] + cells[fast].num_ranks
        times[slow], times[fast] = lightened, loaded
    return tuple(
        CellShare(cell=cell.name, batch=size, step_s=time, steps=own)
        for cell, size, time, own in zip(cells, sizes, times, paced(speeds, exchange), strict=True)
    )


def balance_finding(shares: Sequence[CellShare], *, two_site: bool) -> Finding | None:
    """The batches and the steps, in words. Steps of its own a cell can have with ``mode: two-site``."""
    if not shares:
        return None
    named = shares if len(shares) <= MOST_NAMED else sorted(shares, key=lambda one: one.batch)[:: len(shares) - 1]
    batches = ", ".join(f"{one.cell} {one.batch} ({seconds_text(one.step_s)} a step)" for one in named)
    steps = ", ".join(f"{one.cell} {one.steps}" for one in named)
    own = " (exchange.pace: measured)" if two_site else ""
    among = "" if len(named) == len(shares) else f" (the least and the most of {len(shares)})"
    return Finding(
        level="ok",
        place="balance",
        text=f"cells would end together with batches of {batches}, or with steps a window of {steps}{among}{own}; "
        "a recipe has one batch for all, so give the sites accelerators in proportion",
    )
