"""The warm-up in a plan: who trains it, who waits, and the one transfer of the whole model at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from islandctl.config.recipe import Recipe
from islandctl.config.units import bytes_text, seconds_text
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.plan import CellEstimate, Finding
from islandctl.planner.wan import Link

EXACT_BYTES = 4
"""A value of the seed: fp32."""


def warmup_finding(
    recipe: Recipe, fragments: Sequence[FragmentSize], links: Mapping[str, Link], estimates: Sequence[CellEstimate]
) -> Finding | None:
    """None without a warm-up. ``links`` and ``estimates`` are of all cells, the first one first."""
    steps = recipe.exchange.warmup
    if not steps:
        return None
    first, *others = links
    size = EXACT_BYTES * sum(fragment.values for fragment in fragments)
    seconds = size / links[first].up_bytes_per_s
    seconds += max((size / links[name].down_bytes_per_s for name in others), default=0.0)
    step = estimates[0].step
    last = f", {seconds_text(steps * step.value)}" if step is not None else ""
    text = (
        f"warm-up: the first {steps} steps{last}, by {first} alone while the others wait; then the whole model, "
        f"{bytes_text(size)} as fp32, goes to them once: {seconds_text(seconds)}"
    )
    return Finding(level="ok", place=first, text=text)
