"""What the table compares: every arm with the same grid of learning rates and the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.experiments.equal_compute_lib.settings import Anchored, Butterfly, Run

RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""The sweep starts in the middle; an arm whose best rate is at an end would need a wider grid."""
SEEDS = (0, 1, 2)
STEPS, LONG, BATCH = 1000, 10_000, 256
"""A short training, a long one, and sequences per step."""
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


_ADAMW = Run(steps=STEPS, batch=BATCH)
_SHAMPOO = changed(_ADAMW, inner__kind="shampoo")
_LINK = Anchored(kind="anchor", window=50, fragments=2, overlap=5, codec="int4", outer_lr=1.0, outer_momentum=0.5)
_TWO_SITE = changed(_SHAMPOO, cells=2, joint=JOINT, exchange=_LINK)
_SHORT = changed(_TWO_SITE, exchange__window=4, exchange__overlap=0, exchange__outer_momentum=0.0)
_BUTTERFLY = changed(
    _SHAMPOO,
    cells=8,
    joint=JOINT,
    exchange=Butterfly(kind="butterfly", window=2, fragments=2, overlap=0, codec="bf16"),
)
_BEST = {"ordinary": 0.08, "two-site": 0.04, "short": 0.08, "butterfly": 0.08}
"""The best rates of the arms that others differ from in one thing."""


def _long(run: Run, **changes: Any) -> Run:
    """Ten times the steps, a tenth of them joint where there are cells."""
    return changed(run, steps=LONG, joint=LONG // 10 if run.joint else 0, **changes)


_LONG_ORDINARY = _long(_SHAMPOO)
_LONG_TWO_SITE = _long(_TWO_SITE, exchange__outer_lr=0.8, exchange__outer_momentum=0.8)


def _one(name: str, title: str, kind: str, base: Run, **changes: Any) -> Arm:
    """One thing changed in a short arm: one rate, one seed."""
    return Arm(name, title, changed(base, **changes), "ordinary-shampoo", (_BEST[kind],), SEEDS[:1])


def _one_long(name: str, title: str, base: Run, seeds: Sequence[int] = SEEDS[:1], **changes: Any) -> Arm:
    """The same in a long arm."""
    return Arm(name, title, changed(base, **changes), "long-ordinary", (0.04,), seeds)


def _long_outer(lr: float, momentum: float, seeds: Sequence[int] = SEEDS[:1]) -> Arm:
    """Two sites with another outer step."""
    words = {"exchange__outer_lr": lr, "exchange__outer_momentum": momentum}
    return _one_long(f"long-outer-{lr}-{momentum}", f"long: outer {lr} / {momentum}", _LONG_TWO_SITE, seeds, **words)


ARMS = (
    Arm("long-ordinary", "long: ordinary, Shampoo", _LONG_ORDINARY),
    Arm("long-two-site", "long: two sites, Shampoo, W = 50", _LONG_TWO_SITE, "long-ordinary"),
    Arm("long-butterfly", "long: butterfly, 8 cells, Shampoo", _long(_BUTTERFLY), "long-ordinary"),
    _long_outer(0.7, 0.9, SEEDS),
    _long_outer(1.0, 0.9, SEEDS),
    _long_outer(1.0, 0.5),
    _one_long("long-half-batch", "long: ordinary, half the batch", _LONG_ORDINARY, batch=BATCH // 2),
    _one_long("long-averages", "long: ordinary, β 0.95 and 0.99", _LONG_ORDINARY, inner__betas=(0.95, 0.99)),
    _one_long("long-one-cell", "long: one cell with an outer step", _LONG_TWO_SITE, cells=1),
    Arm("ordinary-shampoo", "ordinary, Shampoo", _SHAMPOO),
    Arm("two-site-shampoo", "two sites, Shampoo, W = 50", _TWO_SITE, "ordinary-shampoo"),
    Arm("two-site-short", "two sites, Shampoo, W = 4", _SHORT, "ordinary-shampoo"),
    Arm("butterfly", "butterfly, 8 cells, Shampoo", _BUTTERFLY, "ordinary-shampoo"),
    Arm("ordinary-adamw", "ordinary, AdamW", _ADAMW),
    Arm(
        "two-site-adamw",
        "two sites, AdamW, W = 50",
        changed(_ADAMW, cells=2, joint=JOINT, exchange=_LINK),
        "ordinary-adamw",
    ),
    _one("window-10", "W = 10, overlap 1", "two-site", _TWO_SITE, exchange__window=10, exchange__overlap=1),
    _one("window-25", "W = 25", "two-site", _TWO_SITE, exchange__window=25),
    _one("window-100", "W = 100", "two-site", _TWO_SITE, exchange__window=100),
    _one("overlap-0", "W = 50, overlap 0", "two-site", _TWO_SITE, exchange__overlap=0),
    _one("overlap-25", "W = 50, overlap 25", "two-site", _TWO_SITE, exchange__overlap=25),
    _one("blend", "W = 50, blend α = 0.5", "two-site", _TWO_SITE, exchange__apply="blend"),
    _one("no-feedback", "W = 50, no error feedback", "two-site", _TWO_SITE, exchange__feedback=0.0),
    _one("nearest", "W = 50, rounded to nearest", "two-site", _TWO_SITE, exchange__rounding="nearest"),
    _one(
        "nearest-no-feedback",
        "W = 50, to nearest, no error feedback",
        "two-site",
        _TWO_SITE,
        exchange__rounding="nearest",
        exchange__feedback=0.0,
    ),
    _one("fp32", "W = 50, fp32", "two-site", _TWO_SITE, exchange__codec="fp32"),
    _one("int8", "W = 50, int8", "two-site", _TWO_SITE, exchange__codec="int8"),
    _one("2bit", "W = 50, 2 bit", "two-site", _TWO_SITE, exchange__codec="2bit"),
    _one("outer-1.0-0.0", "W = 50, plain averaging", "two-site", _TWO_SITE, exchange__outer_momentum=0.0),
    _one(
        "outer-0.7-0.9",
        "W = 50, outer 0.7 / 0.9",
        "two-site",
        _TWO_SITE,
        exchange__outer_lr=0.7,
        exchange__outer_momentum=0.9,
    ),
    _one("no-joint", "W = 50, no joint warm-up", "two-site", _TWO_SITE, joint=0),
    _one("joint-300", "W = 50, joint warm-up of 300 steps", "two-site", _TWO_SITE, joint=300),
    _one("alone", "W = 50, one alone first, on its half of the batch", "two-site", _TWO_SITE, alone=True),
    _one("short-2", "W = 2", "short", _SHORT, exchange__window=2),
    _one("short-fp32", "W = 4, fp32", "short", _SHORT, exchange__codec="fp32"),
    _one("short-joint-300", "W = 4, joint warm-up of 300 steps", "short", _SHORT, joint=300),
    _one("half-batch", "ordinary, half the batch", "ordinary", _SHAMPOO, batch=BATCH // 2),
    _one("eighth-batch", "ordinary, an eighth of the batch", "ordinary", _SHAMPOO, batch=BATCH // 8),
    _one("butterfly-int8", "butterfly, int8", "butterfly", _BUTTERFLY, exchange__codec="int8"),
    _one("butterfly-w4", "butterfly, W = 4", "butterfly", _BUTTERFLY, exchange__window=4),
    _one("butterfly-w16", "butterfly, W = 16", "butterfly", _BUTTERFLY, exchange__window=16),
)
