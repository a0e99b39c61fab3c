"""Changes of one setting that lift what binds. Each is planned again; what does not help is not said."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from islandctl.config.codec import FACTS, CodecName
from islandctl.config.recipe import Training
from islandctl.config.units import bits_per_s_text, bytes_text, memory_text, seconds_text
from islandctl.errors import IslandError
from islandctl.planner.change import BOTH_WAYS, EVERY_SITE, Case
from islandctl.planner.pace import LONG_WAIT
from islandctl.planner.plan import Change, Constraint, Plan
from islandctl.planner.wan import tunnelled

Replan = Callable[[Case], Plan]

WAITING = 0.99
"""A cell that trains for less of the time than this is worth advice."""
PACE = "pace of the slowest"
ADDRESS = "ADDRESS"
"""Stands for one that only the user knows."""
FEW_VALUES = 8
MOST_CELLS = 64
"""With more, planning again and again would take longer than it helps."""


def changes(case: Case, plan: Plan, replan: Replan) -> tuple[Change, ...]:
    """What to set, the cheapest first: settings that cost nothing, then those that may cost quality, then money.

    For a plan that cannot work: what makes it feasible, or at least lifts the binding constraint. For one that only
    waits: what ends the waiting.
    """
    if len(plan.cells) > MOST_CELLS:
        return ()
    binding = plan.constraints[0] if plan.constraints else None
    if not plan.feasible and binding is not None and binding.use > 1:
        return tuple(_lifting(case, plan, binding, replan))
    computing = plan.totals.computing
    if plan.feasible and computing is not None and computing.value < WAITING:
        return tuple(_faster(case, plan, replan))
    return ()


def _lifting(case: Case, plan: Plan, binding: Constraint, replan: Replan) -> Iterator[Change]:
    def helps(new: Plan) -> bool:
        same = next((one for one in new.constraints if one.name == binding.name), None)
        return same is None or same.use <= 1

    for path, values in _candidates(case, plan, binding):
        yield from _first(case, path, values, helps, replan, binding.name)


def _faster(case: Case, plan: Plan, replan: Replan) -> Iterator[Change]:
    pace = next((one.use for one in plan.constraints if one.name == PACE), 0.0)
    exchange = case.recipe.value.exchange
    if pace > LONG_WAIT and exchange.pace == "equal" and exchange.mode == "two-site":
        yield from _first(case, "exchange.pace", ["measured"], lambda new: _waits_less(plan, new), replan, PACE)
    enough = WAITING * (1 - pace)  # what waits for a slower cell, no link can mend

    def helps(new: Plan) -> bool:
        return new.feasible and new.totals.computing is not None and new.totals.computing.value >= enough

    if not helps(plan):
        for path, values in _link_settings(case):
            yield from _first(case, path, values, helps, replan, "")


def _waits_less(plan: Plan, new: Plan) -> bool:
    """Whether the cell that waits most of ``new`` trains for more of its time."""
    before, after = plan.totals.computing, new.totals.computing
    return new.feasible and before is not None and after is not None and after.value > before.value


def _first(
    case: Case, path: str, values: Sequence[Any], helps: Callable[[Plan], bool], replan: Replan, binding: str
) -> Iterator[Change]:
    """The first of ``values`` (from little to much) that helps: of a few one after another, since some may not be
    possible at all, such as windows that checkpoints do not fall on; of many by halving. Nothing when none does."""

    def made(index: int) -> Plan | None:
        try:
            return replan(case.changed(path, values[index]))
        except IslandError:
            return None

    low, high = 0, len(values) - 1
    if high < FEW_VALUES:
        tried = ((number, made(number)) for number in range(len(values)))
        low, best = next(((number, new) for number, new in tried if new is not None and helps(new)), (0, None))
        high = low
    else:
        best = made(high)
        best = None if best is None or not helps(best) else best
    if best is None:
        return
    while low < high:
        middle = (low + high) // 2
        new = made(middle)
        if new is not None and helps(new):
            best, high = new, middle
        else:
            low = middle + 1
    yield Change(
        setting=f"{path}={values[high]}",
        before=_written(case.now(path)),
        after=str(values[high]),
        effect=_effect(best, binding) + ("; launch does not run that yet" if _new_limits(case, best) else ""),
    )


def _new_limits(case: Case, best: Plan) -> bool:
    """Whether the change asks for what ``launch`` refuses, and the recipe did not."""
    return best.recipe.training.recompute != "none" and case.recipe.value.training.recompute == "none"


def _written(value: Any) -> str:
    """A present value as a person would write it."""
    number, _, unit = str(value).partition(" ")
    if value is None:
        return "left out"
    match unit:
        case "bit/s":
            return bits_per_s_text(float(number)).split(" (")[0]
        case "B":
            return bytes_text(float(number))
        case _:
            return str(value)


def _effect(plan: Plan, binding: str) -> str:
    parts = []
    same = next((one for one in plan.constraints if one.name == binding), None)
    if same is not None:
        amounts = f"{_amount(same.need, same.unit)} of {_amount(same.has, same.unit)}"
        parts.append(f"{same.name} {amounts if same.unit else f'{same.use:.1%}'}")
    computing = plan.totals.computing
    if computing is not None:
        parts.append(f"computes {computing.value:.0%} of the time")
    if not plan.feasible:
        parts.append(f"then {plan.constraints[0].name} binds")
    return "; ".join(parts)


def _amount(number: float, unit: str) -> str:
    if unit == "B":
        return memory_text(number)
    return seconds_text(number) if unit == "s" else f"{number:.3g} {unit}".strip()


def _candidates(case: Case, plan: Plan, binding: Constraint) -> Iterator[tuple[str, Sequence[Any]]]:
    recipe, place = case.recipe.value, binding.place.removeprefix("site ")
    site = next((cell.site for cell in plan.cells if cell.name == place), place)
    match binding.name:
        case "memory of a rank":
            yield "training.precision", _others(Training, "precision", recipe.training.precision)
            yield "training.batch", _smaller_batches(plan)
            yield "training.recompute", _others(Training, "recompute", recipe.training.recompute)
            yield f"{site}.gpu.count", _more_accelerators(plan, site)
        case "memory of a node":
            yield "exchange.fragments", _more_fragments(case)
            yield f"{site}.gpu.count", _more_accelerators(plan, site)
            yield f"{site}.cpu.memory", [f"{-(-int(binding.need * share) // 2**30)} GiB" for share in (1.01, 1.1)]
        case "round's deadline":
            yield "exchange.fragments", _more_fragments(case)
            yield "exchange.late.deadline", [f"{binding.need * times:.0f} s" for times in (1.1, 1.5, 2, 4)]
            yield "exchange.codec", _smaller_codecs(recipe.exchange.codec)
            yield f"{site}.wan.{BOTH_WAYS}", _more_bandwidth(plan, site)
        case "WAN in a window":
            yield from _link_settings(case)
        case "space for checkpoints":
            yield "checkpoint.keep", list(range(recipe.checkpoint.keep - 1, 1, -1))
            yield f"{site}.storage.free", [f"{binding.need * times / 1e12:.3g} TB" for times in (1.02, 1.1)]


def _link_settings(case: Case) -> Iterator[tuple[str, Sequence[Any]]]:
    exchange = case.recipe.value.exchange
    if any(tunnelled(site.value, case.recipe.value) for site in case.sites):
        yield "relay.address", [ADDRESS]
    yield "exchange.overlap", range(exchange.overlap + 1, exchange.window)
    yield "exchange.fragments", _more_fragments(case)
    yield "exchange.codec", _smaller_codecs(exchange.codec)
    windows = [round(exchange.window * times) for times in (1.5, 2, 3, 4, 6, 8, 10)]
    yield "exchange.window", windows
    yield "exchange.mode", ["butterfly"] if exchange.mode == "two-site" and len(case.sites) > 2 else []
    slowest = min(case.sites, key=lambda site: min(site.value.wan.up, site.value.wan.down)).value
    alike = len({(site.value.wan.up, site.value.wan.down) for site in case.sites}) == 1
    rate = min(slowest.wan.up, slowest.wan.down)
    yield f"{EVERY_SITE if alike else slowest.name}.wan.{BOTH_WAYS}", _rates(rate)


def _rates(rate: float) -> list[str]:
    """From a twentieth more to a thousand times as much."""
    return [f"{float(f'{rate * 1.05**number / 1e9:.3g}'):g} Gbit/s" for number in range(1, 142)]


def _more_bandwidth(plan: Plan, site: str) -> list[str]:
    return _rates(min(plan.site(site).wan.up, plan.site(site).wan.down))


def _more_fragments(case: Case) -> Sequence[int]:
    exchange = case.recipe.value.exchange
    return range(exchange.fragments + 1, min(case.recipe.value.decoder.layers, exchange.window) + 1)


def _smaller_codecs(codec: CodecName) -> list[str]:
    smaller = [(-facts.bits, name) for name, facts in FACTS.items() if facts.bits < FACTS[codec].bits]
    return [name for _, name in sorted(smaller)]


def _others(section: Any, key: str, present: str) -> list[str]:
    """The choices of a key behind the present one; they are listed from the dearest in memory to the cheapest."""
    known = list(get_args(section.model_fields[key].annotation))
    return known[known.index(present) + 1 :]


def _smaller_batches(plan: Plan) -> Sequence[int]:
    """Batches that every cell's ranks can share, falling."""
    shared = math.lcm(*(cell.num_ranks for cell in plan.cells))
    return range(plan.recipe.training.batch - shared, 0, -shared)


def _more_accelerators(plan: Plan, site: str) -> list[int]:
    """Counts that the batch can be shared by, rising."""
    gpu, batch = plan.site(site).gpu, plan.recipe.training.batch
    cells = sum(cell.site == site for cell in plan.cells)
    counts = (gpu.count * times for times in range(2, 65))
    return [count for count in counts if batch % (count // cells) == 0 and count % gpu.per_node == 0]
