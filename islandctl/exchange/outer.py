"""The outer optimizers: what moves the anchor, with the same bits in every cell, on every processor.

Only separate fp32 multiplications, additions and subtractions on the CPU: each is exactly rounded by IEEE 754, so
x86 and Arm hosts agree. No fused operation, no division of tensors, no transcendental function, no reduction whose
order a library may choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from islandctl.config.exchange import Outer

OuterState = dict[str, Tensor]
"""What an outer optimizer remembers of one chunk: fp32 tensors by name, never written to."""
LR = 0.7
MOMENTUM = 0.9
"""With ``LR`` the published pair of DiLoCo (arXiv 2311.08105)."""


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def weighted_mean(contributions: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    """G = Σ (nᵢ / Σn) · Qᵢ, summed in the order given.

    Args:
        contributions: decoded packets of one chunk, fp32 of equal length, in cell order.
        tokens: tokens behind each. All zero (nothing was trained since): equal weights.
    """
    total = sum(tokens)
    weights = [count / total for count in tokens] if total else [1 / len(tokens)] * len(tokens)
    mean = torch.mul(contributions[0], _scalar(weights[0]))
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        mean = torch.add(mean, torch.mul(contribution, _scalar(weight)))
    return mean


class OuterOptimizer(Protocol):
    """A rule for the anchor. Values, not objects with a life: what they remember goes in and comes out."""

    def first_state(self, numel: int) -> OuterState:
        """The state of a chunk of ``numel`` values before its first round."""

    def step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, OuterState]:
        """Take one step.

        Args:
            anchor: the chunk's anchor, fp32.
            state: of the chunk.
            mean: G, from ``weighted_mean``, same length.

        Returns:
            The new anchor and the new state; the arguments stay as they are.
        """


@dataclass(frozen=True)
class Average:
    """anchor ← anchor − G: the anchor becomes the weighted mean of the cells' values."""

    def first_state(self, numel: int) -> OuterState:
        return {}

    def step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, OuterState]:
        return torch.sub(anchor, mean), state


@dataclass(frozen=True)
class Nesterov:
    """m ← μm + G; anchor ← anchor − η(G + μm) (DiLoCo, arXiv 2311.08105)."""

    lr: float
    decay: float

    def first_state(self, numel: int) -> OuterState:
        return {"momentum": torch.zeros(numel)}

    def step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, OuterState]:
        rate, mu = _scalar(self.lr), _scalar(self.decay)
        moved = torch.add(torch.mul(state["momentum"], mu), mean)
        update = torch.add(mean, torch.mul(moved, mu))
        return torch.sub(anchor, torch.mul(update, rate)), {"momentum": moved}


@dataclass(frozen=True)
class DelayedNesterov:
    """Delayed Nesterov (Liu et al., arXiv 2401.09135, "delayed Nesterov update" with c = 0).

    Every step: anchor ← anchor − η·G/N. Every N-th one (N = ``delay``) first m ← μm + (the mean of the last N G), and
    takes −η·μm as well. With N = 1 it is ``Nesterov``.
    """

    lr: float
    decay: float
    delay: int

    def first_state(self, numel: int) -> OuterState:
        """``sum`` of the G since the momentum last moved, and how many are ``held`` in it (one value)."""
        return {"momentum": torch.zeros(numel), "sum": torch.zeros(numel), "held": torch.zeros(1)}

    def step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, OuterState]:
        rate, mu, share = _scalar(self.lr), _scalar(self.decay), _scalar(1 / self.delay)
        moved, held = state["momentum"], torch.add(state["held"], 1)
        total, update = torch.add(state["sum"], mean), torch.mul(mean, share)
        if int(held) >= self.delay:
            moved = torch.add(torch.mul(moved, mu), torch.mul(total, share))
            update = torch.add(update, torch.mul(moved, mu))
            total, held = torch.zeros_like(total), torch.zeros_like(held)
        return torch.sub(anchor, torch.mul(update, rate)), {"momentum": moved, "sum": total, "held": held}


def outer_optimizer(settings: Outer) -> OuterOptimizer:
    """The one that the recipe names."""
    if settings.kind == "average":
        return Average()
    lr = LR if settings.lr is None else settings.lr
    decay = MOMENTUM if settings.momentum is None else settings.momentum
    if settings.delay is not None:
        return DelayedNesterov(lr, decay, settings.delay)
    return Nesterov(lr, decay)
