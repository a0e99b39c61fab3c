"""What the table compares: every arm with the same grid of learning rates and the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.experiments.equal_compute_lib.settings import Anchored, Butterfly, Inner, Run

RATES = (0.005, 0.01, 0.02)
SEEDS = (0, 1, 2)
STEPS, BATCH = 1000, 128
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


_ORDINARY = Run(steps=STEPS, batch=BATCH, inner=Inner(kind="adamw"))
_TWO_SITE = changed(
    _ORDINARY,
    cells=2,
    joint=JOINT,
    exchange=Anchored(
        kind="anchor", window=50, fragments=4, overlap=5, codec="int4", outer_lr=1.0, outer_momentum=0.0
    ),
)
_BUTTERFLY = changed(
    _ORDINARY,
    cells=8,
    joint=JOINT,
    exchange=Butterfly(kind="butterfly", window=8, fragments=4, overlap=1, codec="bf16"),
)
_RATE = 0.01
"""Of the ablations: the best of the arm that they vary."""


def _ablation(name: str, title: str, **changes: Any) -> Arm:
    return Arm(name, title, changed(_TWO_SITE, **changes), "ordinary-adamw", (_RATE,), SEEDS[:1])


ARMS = (
    Arm("ordinary-adamw", "ordinary, AdamW", _ORDINARY),
    Arm("ordinary-shampoo", "ordinary, Shampoo", changed(_ORDINARY, inner__kind="shampoo")),
    Arm("two-site-adamw", "two sites, AdamW", _TWO_SITE, "ordinary-adamw"),
    Arm("two-site-shampoo", "two sites, Shampoo", changed(_TWO_SITE, inner__kind="shampoo"), "ordinary-shampoo"),
    Arm("butterfly", "butterfly, 8 cells, AdamW", _BUTTERFLY, "ordinary-adamw"),
    _ablation("window-10", "two sites, W = 10", exchange__window=10, exchange__overlap=1),
    _ablation("window-25", "two sites, W = 25", exchange__window=25, exchange__overlap=3),
    _ablation("window-100", "two sites, W = 100", exchange__window=100, exchange__overlap=10),
    _ablation("overlap-0", "two sites, overlap 0", exchange__overlap=0),
    _ablation("overlap-25", "two sites, overlap 25", exchange__overlap=25),
    _ablation("blend", "two sites, blend α = 0.5", exchange__apply="blend"),
    _ablation("no-joint", "two sites, no joint warm-up", joint=0),
    _ablation("alone", "two sites, one site alone first, on its half of the batch", alone=True),
)
