"""What the table compares: every arm with the same grid of learning rates and the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.experiments.equal_compute_lib.settings import Anchored, Butterfly, Run

RATES = (0.02, 0.04, 0.08, 0.16)
SEEDS = (0, 1, 2)
STEPS, BATCH = 1000, 256
JOINT = STEPS // 10


@dataclass(frozen=True)
class Arm:
    """One row of the table."""

    name: str
    title: str
    run: Run
    """Of any seed and learning rate."""
    against: str | None = None
    """The arm that it is measured by."""
    rates: Sequence[float] = RATES
    """Of an ablation: only the rate of the arm that it varies."""
    seeds: Sequence[int] = SEEDS

    def runs(self, rate: float) -> Iterator[Run]:
        """The arm's runs at a learning rate, a seed each."""
        for seed in self.seeds:
            yield changed(self.run, inner__lr=rate, seed=seed)


def changed(run: Run, **changes: Any) -> Run:
    """The run with other values: ``exchange__codec="int4"`` goes to its exchange."""
    tree = run.model_dump()
    for path, value in changes.items():
        place = tree
        *outer, last = path.split("__")
        for name in outer:
            place = place[name]
        place[last] = value
    return Run.model_validate(tree)


def other(arm: Arm, text: str | None, seeds: Sequence[int] | None) -> Arm:
    """The arm on other text, or with other seeds."""
    run = arm.run if text is None else changed(arm.run, text=text)
    return replace(arm, run=run, seeds=arm.seeds if seeds is None else seeds)


_ORDINARY = Run(steps=STEPS, batch=BATCH)
_TWO_SITE = changed(
    _ORDINARY,
    cells=2,
    joint=JOINT,
    exchange=Anchored(
        kind="anchor", window=50, fragments=2, overlap=5, codec="int4", outer_lr=1.0, outer_momentum=0.5
    ),
)
_BUTTERFLY = changed(
    _ORDINARY,
    cells=8,
    joint=JOINT,
    exchange=Butterfly(kind="butterfly", window=4, fragments=2, overlap=0, codec="bf16"),
)
_RATE = 0.04
"""Of the ablations: the best of the arms that they vary."""


def _ablation(name: str, title: str, base: Run = _TWO_SITE, **changes: Any) -> Arm:
    return Arm(name, title, changed(base, **changes), "ordinary-adamw", (_RATE,), SEEDS[:1])


ARMS = (
    Arm("ordinary-adamw", "ordinary, AdamW", _ORDINARY),
    Arm("ordinary-shampoo", "ordinary, Shampoo", changed(_ORDINARY, inner__kind="shampoo")),
    Arm("two-site-shampoo", "two sites, Shampoo", changed(_TWO_SITE, inner__kind="shampoo"), "ordinary-shampoo"),
    Arm("two-site-adamw", "two sites, AdamW", _TWO_SITE, "ordinary-adamw"),
    Arm("butterfly", "butterfly, 8 cells, AdamW", _BUTTERFLY, "ordinary-adamw"),
    Arm(
        "joint-300",
        "two sites, Shampoo, joint warm-up of 300 steps",
        changed(_TWO_SITE, inner__kind="shampoo", joint=300),
        "ordinary-shampoo",
    ),
    _ablation("no-feedback", "two sites, no error feedback", exchange__feedback=0.0),
    _ablation("nearest", "two sites, rounded to nearest", exchange__rounding="nearest"),
    _ablation(
        "nearest-no-feedback",
        "two sites, to nearest, no error feedback",
        exchange__rounding="nearest",
        exchange__feedback=0.0,
    ),
    _ablation("fp32", "two sites, fp32", exchange__codec="fp32"),
    _ablation("int8", "two sites, int8", exchange__codec="int8"),
    _ablation("2bit", "two sites, 2 bit", exchange__codec="2bit"),
    _ablation("overlap-0", "two sites, overlap 0", exchange__overlap=0),
    _ablation("overlap-25", "two sites, overlap 25", exchange__overlap=25),
    _ablation("blend", "two sites, blend α = 0.5", exchange__apply="blend"),
    _ablation("window-10", "two sites, W = 10, overlap 1", exchange__window=10, exchange__overlap=1),
    _ablation("window-25", "two sites, W = 25", exchange__window=25),
    _ablation("window-100", "two sites, W = 100", exchange__window=100),
    _ablation("outer-0.7-0.9", "two sites, outer 0.7 / 0.9", exchange__outer_lr=0.7, exchange__outer_momentum=0.9),
    _ablation("outer-1.0-0.0", "two sites, plain averaging", exchange__outer_momentum=0.0),
    _ablation("no-joint", "two sites, no joint warm-up", joint=0),
    _ablation("alone", "two sites, one alone first, on its half of the batch", alone=True),
    _ablation("half-batch", "ordinary, half the batch", _ORDINARY, batch=BATCH // 2),
    _ablation("butterfly-int8", "butterfly, int8", _BUTTERFLY, exchange__codec="int8"),
    _ablation("butterfly-w16", "butterfly, W = 16", _BUTTERFLY, exchange__window=16),
)
