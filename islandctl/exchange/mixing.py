"""Two cells mix: the same arithmetic on both sides, so that what one gives the other takes.

Separate multiplications, additions and subtractions only, each exactly rounded by IEEE 754: both partners get the
same bits on any processor. ``x̂`` is what a cell's packet says of its value, as both partners decode it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def owed(value: Tensor, reference: Tensor, residual: Tensor) -> Tensor:
    """v = (x − R) + e: what is to be sent, with the residual's share ``residual``. All of one shape and dtype."""
    return torch.add(torch.sub(value, reference), residual)


def told(reference: Tensor, sent: Tensor) -> Tensor:
    """x̂ = R + C(v), with ``sent`` = C(v)."""
    return torch.add(reference, sent)


def half_step(own: Tensor, other: Tensor) -> Tensor:
    """½(x̂ⱼ − x̂ᵢ), to be added to the value of cell i.

    The partner's is exactly the opposite, so the mean of all cells stays, whatever the codec has lost. (The form
    ½(x + x̂ⱼ) would move it by half the difference of the codec's errors.)
    """
    return torch.mul(torch.sub(other, own), 0.5)


def midpoint(one: Tensor, other: Tensor) -> Tensor:
    """½(x̂ᵢ + x̂ⱼ): the pair's next reference, and in the run's last rounds the value. Symmetric, bit for bit."""
    return torch.mul(torch.add(one, other), 0.5)
