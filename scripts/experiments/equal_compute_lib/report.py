"""From kept results to figures: means with standard errors, ratios by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.experiments.equal_compute_lib.arms import Arm
from scripts.experiments.equal_compute_lib.cache import Cache


@dataclass(frozen=True)
class Figure:
    """A mean over seeds."""

    mean: float
    error: float | None
    """Standard error of the mean; None: one seed."""
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.error:.4f}" if self.error is not None else " (one seed)")

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {"mean": self.mean, "standard_error": self.error, "seeds": self.count}


@dataclass(frozen=True)
class Row:
    """An arm's results at its best learning rate."""

    arm: Arm
    rate: float
    results: dict[int, dict[str, Any]]
    """By seed."""
    by_rate: dict[float, Figure]
    cpu_s: float
    """Of all its runs, the sweep included."""

    @property
    def bits_per_byte(self) -> Figure:
        """On held-out text."""
        return figure([result["bits_per_byte"] for result in self.results.values()])

    @property
    def is_whole(self) -> bool:
        """Whether the sweep has gone past the best rate on both sides, and all seeds are there."""
        grid = sorted(self.arm.rates)
        place = grid.index(self.rate)
        beside = grid[max(0, place - 1) : place + 2]
        return all(rate in self.by_rate for rate in beside) and len(self.results) == len(self.arm.seeds)

    def mean(self, key: str) -> float:
        """Of another figure of the results."""
        return float(sum(result[key] for result in self.results.values()) / len(self.results))


def figure(numbers: Sequence[float]) -> Figure:
    """Mean and standard error."""
    count, mean = len(numbers), sum(numbers) / len(numbers)
    if count < 2:
        return Figure(mean, None, count)
    variance = sum((number - mean) ** 2 for number in numbers) / (count - 1)
    return Figure(mean, math.sqrt(variance / count), count)


def ratio(row: Row, base: Row) -> Figure | None:
    """Bits per byte over the base's, seed by seed: equal seeds share first values and text."""
    seeds = sorted(row.results.keys() & base.results.keys())
    pairs = [row.results[seed]["bits_per_byte"] / base.results[seed]["bits_per_byte"] for seed in seeds]
    return figure(pairs) if pairs else None


def row_of(arm: Arm, cache: Cache) -> Row | None:
    """What is kept of the arm, at the rate with the lowest mean over its first seed; None: nothing is."""
    found: dict[float, dict[int, dict[str, Any]]] = {}
    for rate in arm.rates:
        kept = {run.seed: result for run in arm.runs(rate) if (result := cache.get(run)) is not None}
        if arm.seeds[0] in kept:
            found[rate] = kept
    if not found:
        return None
    best = min(found, key=lambda rate: found[rate][arm.seeds[0]]["bits_per_byte"])
    by_rate = {rate: figure([one["bits_per_byte"] for one in kept.values()]) for rate, kept in found.items()}
    cpu_s = sum(float(one.get("cpu_s", 0.0)) for kept in found.values() for one in kept.values())
    return Row(arm, best, found[best], by_rate, cpu_s)
