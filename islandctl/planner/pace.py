"""Sites of unequal speed: how many steps of its own each cell takes in a window, and who still waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from islandctl.config.exchange import Exchange
from islandctl.config.load import Loaded
from islandctl.config.pace import middle_speed, pace_limits, paced
from islandctl.config.recipe import Recipe
from islandctl.config.units import seconds_text
from islandctl.errors import ConfigError
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding

UNEQUAL = 1.2
"""Times the fastest cell's time from which a slow one deserves a word."""
LONG_WAIT = 0.1
"""Share of its time that a cell may wait for slower ones before something is advised."""
FEW_CELLS = 4
"""Up to so many are named one by one."""


def with_own_steps(
    recipe: Loaded[Recipe], cells: tuple[CellPlan, ...], step_of: Callable[[CellPlan], Figure | None]
) -> tuple[CellPlan, ...]:
    """The cells, each with its own steps a window where the recipe asks for them.

    Args:
        step_of: seconds of a cell's step; None: not known.

    Raises:
        ConfigError: how fast a cell trains is not known.
    """
    if recipe.value.exchange.pace == "equal":
        return cells
    speeds = []
    for cell in cells:
        step = step_of(cell)
        if step is None:
            raise ConfigError(
                f"{recipe.at('exchange', 'pace')}: exchange.pace: measured, but how fast site {cell.site} trains is "
                "not known",
                hint="give measured.step in its profile, or plan with --from-run of a run that has shown it",
            )
        speeds.append(1 / step.value)
    owns = paced(speeds, recipe.value.exchange)
    return tuple(cell.model_copy(update={"window": own}) for cell, own in zip(cells, owns, strict=True))


def window_figures(
    exchange: Exchange, cells: Sequence[CellPlan], steps: Sequence[Figure | None]
) -> list[Figure | None]:
    """Each cell's own steps a window with the formula; None where all take the recipe's."""
    known = [1 / step.value for step in steps if step is not None]
    if exchange.pace == "equal" or len(known) < len(cells):
        return [None] * len(cells)
    (least, most), middle = pace_limits(exchange), middle_speed(known)
    return [
        Figure(
            value=cell.window or exchange.window,
            low=cell.window or exchange.window,
            high=cell.window or exchange.window,
            unit="steps",
            formula=f"window {exchange.window} × {speed:.3g} steps/s / {middle:.3g} of the mean cell (geometric), "
            f"within {least} to {most} (exchange.pace_bound {exchange.bound:g}, a step a fragment)",
            assumed=step is not None and step.assumed,
        )
        for cell, speed, step in zip(cells, known, steps, strict=True)
    ]


def pace_finding(exchange: Exchange, estimates: Sequence[CellEstimate]) -> Finding | None:
    """Cells of unequal speed: the faster one waits, or each takes its own steps."""
    known = [(one.run_step.value, one) for one in estimates if one.run_step is not None]
    if len(known) < 2:
        return None
    (fast, first), (slow, last) = (pick(known, key=lambda each: each[0]) for pick in (min, max))
    place, wait = f"{first.cell}, {last.cell}", 1 - fast / slow
    more = f"give {last.cell} {slow / fast:.2g} times the accelerators, or {first.cell} fewer"
    if exchange.pace == "measured":
        named = [one for _, one in known] if len(known) <= FEW_CELLS else [first, last]
        text = f"{_own_steps(exchange, named, len(known))}; {first.cell} will wait {wait:.1%} of the time"
        if wait <= LONG_WAIT:
            return Finding(level="ok", place=place, text=text)
        least, most = pace_limits(exchange)
        bound = (first.window and first.window.value == most) or (last.window and last.window.value == least)
        hint = f"exchange.pace_bound {exchange.bound:g} allows no more; raise it, or {more}"
        return Finding(level="warn", place=place, text=text, hint=hint if bound else "a longer exchange.window fits")
    if slow <= UNEQUAL * fast:
        return None
    own = "exchange.pace: measured gives each its own steps a window; or " if exchange.mode == "two-site" else ""
    return Finding(
        level="warn",
        place=place,
        text=f"a step takes {seconds_text(fast)} in {first.cell} and {seconds_text(slow)} in {last.cell}: "
        f"{first.cell} will wait {wait:.0%} of the time",
        hint=own + more,
    )


def _own_steps(exchange: Exchange, named: Sequence[CellEstimate], num_cells: int) -> str:
    """Each one's steps, and how long its window takes."""
    each = ", ".join(
        f"{one.cell} {one.window.value:.0f} ({seconds_text(exchange.window * one.run_step.value)})"
        for one in named
        if one.window is not None and one.run_step is not None
    )
    among = "" if len(named) == num_cells else f" (the fastest and the slowest window of {num_cells})"
    return f"steps a window, each its own number: {each}{among}"
