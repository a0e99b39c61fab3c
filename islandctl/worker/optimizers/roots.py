"""Inverse fourth roots of many symmetric matrices at once."""

from __future__ import annotations

import torch
from torch import Tensor

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
POWER = -0.25
"""Two factors of a matrix, each to −1/4: Shampoo's exponent −1/(2k) for tensors of order k = 2."""


def inverse_roots(factors: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """(F + damping · λ_max · I)^(−1/4) of every matrix F of a stack.

    The damping is relative to the largest eigenvalue: gradients, and with them the factors, differ by many orders of
    magnitude between layers and over a run, so that any absolute number would be nothing here and everything there.
    It also has to stand above the noise of a float32 decomposition, about 1e-7 · λ_max.

    Args:
        factors: (B, n, n), symmetric, positive semi-definite up to rounding; float32 or float64.
        damping: relative.

    Returns:
        The roots (B, n, n), and (B,) bool: whether it could be computed. What could not is zeros, and so is the root
        of a factor of zeros, which stands for "nothing seen yet".
    """
    good = factors.isfinite().flatten(1).all(dim=1)
    try:
        roots = _roots(factors if bool(good.all()) else factors.where(good[:, None, None], 0.0), damping)
    except LinAlgError:
        roots = torch.full_like(factors, torch.nan)
    doubtful = good & ~roots.isfinite().flatten(1).all(dim=1)
    for index in doubtful.nonzero().flatten().tolist():
        root = _one_by_one(factors[index : index + 1], damping)
        good[index] = root is not None
        roots[index] = 0.0 if root is None else root[0]
    return roots, good


def _roots(factors: Tensor, damping: float) -> Tensor:
    values, vectors = torch.linalg.eigh(factors)
    top = values[:, -1:]
    powers = (values.clamp_min(0.0) + damping * top).pow(POWER)
    return torch.where(top[:, None] > 0, (vectors * powers[:, None]) @ vectors.mT, 0.0)


def _one_by_one(factor: Tensor, damping: float) -> Tensor | None:
    """A batch fails as a whole; alone, or in float64, a matrix may still be decomposed."""
    for dtype in (factor.dtype, torch.float64):
        try:
            root = _roots(factor.to(dtype), damping).to(factor.dtype)
        except LinAlgError:
            continue
        if bool(root.isfinite().all()):
            return root
    return None
