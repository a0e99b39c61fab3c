"""Sites of unequal speed: steps a window, with which all end a window together."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.exchange import Exchange
from islandctl.config.pace import paced
from islandctl.planner.pace import UNEQUAL
from islandctl.planner.plan import CellPlan, CellShare, Finding

MOST_NAMED = 4


def balanced(cells: Sequence[CellPlan], steps_s: Sequence[float], exchange: Exchange) -> tuple[CellShare, ...]:
    """What ``exchange.pace: measured`` would give them. Empty where the cells are about equally fast, or cannot have
    steps of their own.

    Args:
        steps_s: seconds of a step of every cell.
    """
    if exchange.mode != "two-site" or max(steps_s) <= UNEQUAL * min(steps_s):
        return ()
    own = paced([1 / seconds for seconds in steps_s], exchange)
    return tuple(CellShare(cell=cell.name, steps=steps) for cell, steps in zip(cells, own, strict=True))


def balance_finding(shares: Sequence[CellShare]) -> Finding | None:
    """The steps, in words."""
    if not shares:
        return None
    named = shares if len(shares) <= MOST_NAMED else sorted(shares, key=lambda one: one.steps)[:: len(shares) - 1]
    steps = ", ".join(f"{one.cell} {one.steps}" for one in named)
    among = "" if len(named) == len(shares) else f" (the least and the most of {len(shares)})"
    text = f"cells would end a window together with steps of their own, {steps}{among}: exchange.pace: measured"
    return Finding(level="ok", place="balance", text=text)
