"""The outer step: the same bits in every cell, on every processor.

Only separate fp32 multiplications, additions and subtractions on the CPU: each is exactly rounded by IEEE 754, so
x86 and Arm hosts agree. No fused operation, no division of tensors, no transcendental function, no reduction whose
order a library may choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def nesterov(anchor: Tensor, momentum: Tensor, mean: Tensor, *, lr: float, decay: float) -> tuple[Tensor, Tensor]:
    """m ← μm + G; anchor ← anchor − η(G + μm) (DiLoCo, arXiv 2311.08105).

    Args:
        anchor: the chunk's anchor, fp32.
        momentum: the outer momentum m, fp32, same length.
        mean: G, from ``weighted_mean``.
        lr: η.
        decay: μ. With μ = 0 and η = 1 the anchor becomes the weighted mean of the cells' values.

    Returns:
        The new anchor and the new momentum; the arguments stay as they are.
    """
    rate, mu = _scalar(lr), _scalar(decay)
    moved = torch.add(torch.mul(momentum, mu), mean)
    update = torch.add(mean, torch.mul(moved, mu))
    return torch.sub(anchor, torch.mul(update, rate)), moved
