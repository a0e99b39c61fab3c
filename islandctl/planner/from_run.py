"""A run held against its plan, and what it has shown put in the place of what was assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from islandctl.config.load import Loaded
from islandctl.config.model import Model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.measured import CellShown
from islandctl.planner.plan import Figure, Plan

FEWEST_FAILURES = 3
"""Fewer say too little to take the place of the assumed rate."""
NEAR = 0.01
"""Bytes that differ by no more than this share are as planned."""


class Comparison(Model):
    """One figure of one cell, measured against planned."""

    cell: str
    name: str
    """``memory``, ``step``, ``sent``, ``fetched`` or ``exchange``."""
    unit: str
    planned: float | None
    low: float | None
    high: float | None
    """The planned range; None: the plan did not know."""
    measured: float | None
    """None: the run has not shown it."""
    within: bool | None
    """Whether the planned range holds it; None: one of the two is not known."""


class Shown(Model):
    """What a run has shown, beside its plan."""

    run: str
    plan: Plan
    cells: tuple[CellShown, ...]

    def comparisons(self) -> tuple[Comparison, ...]:
        """Every figure of every cell."""
        found = []
        for seen, estimate in zip_longest(self.cells, self.plan.estimates):  # of a script there is no estimate
            for name, unit, key, value in (
                ("memory", "B", "memory_per_rank", seen.memory_bytes),
                ("step", "s", "step", seen.step_s),
                ("sent", "B", "bytes_up_per_window", seen.sent),
                ("fetched", "B", "bytes_down_per_window", seen.fetched),
                ("exchange", "s", "exchange", seen.exchange_s),
            ):
                found.append(_compared(seen.cell, name, unit, getattr(estimate, key, None), value))
        return tuple(found)

    @property
    def failures(self) -> int:
        """Of all cells."""
        return sum(cell.failures for cell in self.cells)

    @property
    def accelerator_hours(self) -> float:
        """Of all cells."""
        return sum(seen.hours * cell.num_ranks for seen, cell in zip(self.cells, self.plan.cells, strict=True))


def _compared(cell: str, name: str, unit: str, planned: Figure | None, measured: float | None) -> Comparison:
    within = None
    if planned is not None and measured is not None:
        within = planned.low <= measured <= planned.high or abs(measured - planned.value) <= NEAR * planned.value
    return Comparison(
        cell=cell,
        name=name,
        unit=unit,
        planned=None if planned is None else planned.value,
        low=None if planned is None else planned.low,
        high=None if planned is None else planned.high,
        measured=measured,
        within=within,
    )


def adopted(shown: Shown, recipe: Recipe, sites: Sequence[Loaded[SiteProfile]]) -> list[Loaded[SiteProfile]]:
    """The profiles with what the run has shown of the same site, as far as ``recipe`` asks for the same there.

    A step and its memory hold for the same model, batch and accelerators; bytes for the same model and exchange; a
    round's time for the same link as well. What a profile itself says as measured stays, unless the run was planned
    with it.
    """
    then = shown.plan.recipe
    same_step = _same(then, recipe, _STEP)
    same_bytes = _same(then, recipe, _BYTES) and len(sites) == len(shown.plan.sites)
    same_links = same_bytes and all(
        _known(shown, site) and shown.plan.site(site.value.name).wan == site.value.wan for site in sites
    )
    return [
        _with(shown, site, step=same_step, packets=same_bytes, links=same_links) if _known(shown, site) else site
        for site in sites
    ]


def _known(shown: Shown, site: Loaded[SiteProfile]) -> bool:
    return any(one.name == site.value.name for one in shown.plan.sites)


_STEP = (
    "model", "training.batch", "training.sequence", "training.precision", "training.recompute",
    "training.optimizer.kind", "exchange.cells",
)  # fmt: skip
_BYTES = (
    "model", "exchange.mode", "exchange.cells", "exchange.fragments", "exchange.codec", "exchange.block",
    "exchange.exact", "exchange.chunk", "relay.emulate",
)  # fmt: skip


def _same(one: Recipe, other: Recipe, paths: Sequence[str]) -> bool:
    return all(_at(one, path) == _at(other, path) for path in paths)


def _at(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key, None)
    return value


def _with(
    shown: Shown, loaded: Loaded[SiteProfile], *, step: bool, packets: bool, links: bool
) -> Loaded[SiteProfile]:
    site, then = loaded.value, shown.plan.site(loaded.value.name)
    seen = [one for one, cell in zip(shown.cells, shown.plan.cells, strict=True) if cell.site == site.name]
    alike = site.gpu == then.gpu
    values = {
        "step": _most(one.step_s for one in seen) if step and alike else None,
        "memory": _most(one.memory_bytes for one in seen) if step and alike else None,
        "sent": _most(one.sent for one in seen) if packets else None,
        "fetched": _most(one.fetched for one in seen) if packets else None,
        "exchange": _most(one.exchange_s for one in seen) if links else None,
    }
    own = {
        key: round(value) if key in ("memory", "sent", "fetched") else value
        for key, value in values.items()
        if value is not None and getattr(site.measured, key) in (None, getattr(then.measured, key))
    }
    update: dict[str, Any] = {}
    if own:
        update["measured"] = site.measured.model_copy(update={**own, "source": f"run {shown.run}"})
    if shown.failures >= FEWEST_FAILURES and site.failures.per_gpu == then.failures.per_gpu:
        seconds = shown.accelerator_hours * 3600 / shown.failures
        update["failures"] = site.failures.model_copy(update={"per_gpu": seconds})
    return dataclasses.replace(loaded, value=site.model_copy(update=update)) if update else loaded


def _most(values: Any) -> float | None:
    """The greatest of what is known."""
    return max((value for value in values if value is not None), default=None)
