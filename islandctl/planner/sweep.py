"""One or two settings varied, everything planned again at every point."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import product

from pydantic import Field

from islandctl.config.model import Model
from islandctl.errors import IslandError, UsageError
from islandctl.planner.change import Case
from islandctl.planner.estimate import Setting
from islandctl.planner.plan import Plan

POINTS = 25
"""Of one axis, unless told."""
MOST_POINTS = 2000
"""Of all axes together."""
_RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?::(?P<points>\d+))?")
_AMOUNT = re.compile(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*(.*)")


class Axis(Model):
    """One setting and the values that it takes."""

    path: str
    values: tuple[str, ...]
    """As in a file."""
    numbers: tuple[float, ...]
    """The same without their unit."""
    unit: str


class Point(Model):
    """A planned point. What is None hangs on a step time that is unknown, or could not be planned."""

    values: tuple[str, ...]
    numbers: tuple[float, ...]
    feasible: bool
    binds: str
    """The weakest link, or why this point cannot be planned."""
    computing: float | None = None
    """Share of the time in which the cell that waits most trains."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float | None = None
    """The fullest rank's."""
    link_share: float | None = None
    usd_per_billion_tokens: float | None = None
    usd_to_end: float | None = None
    methods: dict[str, float] = Field(default_factory=dict)
    """Share of the time in which the accelerators compute, for each published method."""


class Swept(Model):
    """A whole sweep."""

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]


def parse_axis(text: str) -> Axis:
    """``PATH=LOW..HIGH`` or ``PATH=LOW..HIGH:POINTS``, or ``PATH=A,B,C`` for these values.

    A range that spans ten times or more is spaced by equal factors, else by equal differences; between two whole
    numbers without a unit lie whole numbers.

    Raises:
        UsageError: not of this form, units that do not match, or no range.
    """
    path, equals, rest = text.partition("=")
    example = "for example --sweep 'site.wan.bandwidth=0.1..1000 Gbit/s:50' or --sweep exchange.fragments=1..14"
    if not equals or not path.strip():
        raise UsageError(f"--sweep {text}: expected PATH=LOW..HIGH", hint=example)
    match = _RANGE.fullmatch(rest.strip())
    if match is None:
        values = tuple(part.strip() for part in rest.split(",") if part.strip())
        if len(values) < 2:
            raise UsageError(f"--sweep {text}: expected PATH=LOW..HIGH or PATH=A,B,…", hint=example)
        amounts = [_AMOUNT.fullmatch(value) for value in values]
        numbers = tuple(float(found[1]) if found else float(place) for place, found in enumerate(amounts))
        return Axis(path=path.strip(), values=values, numbers=numbers, unit="")
    ends = [_AMOUNT.fullmatch(match[name].strip()) for name in ("low", "high")]
    if ends[0] is None or ends[1] is None:
        raise UsageError(f"--sweep {text}: the ends of a range are numbers", hint=example)
    unit = ends[1][2].strip()
    if ends[0][2].strip() not in ("", unit):
        raise UsageError(f"--sweep {text}: both ends need one unit, not {ends[0][2]} and {unit}", hint=example)
    low, high = float(ends[0][1]), float(ends[1][1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"--sweep {text}: the range must rise", hint=example)
    whole = all(re.fullmatch(r"[+-]?\d+", end[1]) for end in ends) and not unit  # type: ignore[index]
    points = int(match["points"]) if match["points"] else POINTS
    if not 2 <= points <= MOST_POINTS:
        raise UsageError(f"--sweep {text}: from 2 to {MOST_POINTS} points, not {points}", hint=example)
    numbers = tuple(_spaced(low, high, points, whole))
    written = [f"{number:.0f}" if whole else f"{number:.10g} {unit}".strip() for number in numbers]
    return Axis(path=path.strip(), values=tuple(written), numbers=numbers, unit=unit)


def _spaced(low: float, high: float, points: int, whole: bool) -> list[float]:
    if low > 0 and high / low >= 10:
        numbers = [low * (high / low) ** (number / (points - 1)) for number in range(points)]
    else:
        numbers = [low + (high - low) * number / (points - 1) for number in range(points)]
    return list(dict.fromkeys(float(round(number)) for number in numbers)) if whole else numbers


def sweep(
    case: Case,
    axes: Sequence[Axis],
    planned: Callable[[Case], tuple[Plan, Setting]],
    shares: Callable[[Setting, Plan], dict[str, float]],
) -> Swept:
    """Plan every point; one that cannot be planned (a value that is not possible with the others) says why.

    Raises:
        UsageError: none, or more than two settings; too many points; or no point at all can be planned.
    """
    if not 1 <= len(axes) <= 2 or len({axis.path for axis in axes}) < len(axes):
        raise UsageError("--sweep varies one setting, or two different ones")
    if math.prod(len(axis.values) for axis in axes) > MOST_POINTS:
        raise UsageError(f"--sweep: more than {MOST_POINTS} points", hint="end a range with :POINTS")
    points: list[Point] = []
    last: IslandError | None = None
    for chosen in product(*(range(len(axis.values)) for axis in axes)):
        values = tuple(axis.values[index] for axis, index in zip(axes, chosen, strict=True))
        numbers = tuple(axis.numbers[index] for axis, index in zip(axes, chosen, strict=True))
        try:
            together = [(axis.path, value) for axis, value in zip(axes, values, strict=True)]
            plan, setting = planned(case.changed_together(together))
            points.append(_point(values, numbers, plan, shares(setting, plan)))
        except IslandError as error:
            last = error
            points.append(Point(values=values, numbers=numbers, feasible=False, binds=error.message))
    if last is not None and all(point.computing is None and point.memory_bytes is None for point in points):
        raise UsageError(last.message, hint=last.hint)
    return Swept(axes=tuple(axes), points=tuple(points))


def _point(values: tuple[str, ...], numbers: tuple[float, ...], plan: Plan, methods: dict[str, float]) -> Point:
    totals = plan.totals
    steps = [one.step.value for one in plan.estimates if one.step is not None]
    links = [one.link_share.value for one in plan.estimates if one.link_share is not None]
    each, end = totals.cost_per_billion_tokens, totals.cost_to_end
    return Point(
        values=values,
        numbers=numbers,
        feasible=plan.feasible,
        binds=plan.constraints[0].name if plan.constraints else "",
        computing=None if totals.computing is None else totals.computing.value,
        step_s=max(steps, default=None),
        tokens_per_s=None if totals.tokens_per_s is None else totals.tokens_per_s.value,
        memory_bytes=max(one.memory_per_rank.value for one in plan.estimates),
        link_share=max(links, default=None),
        usd_per_billion_tokens=None if each is None else each.value,
        usd_to_end=None if end is None else end.value,
        methods=methods,
    )
