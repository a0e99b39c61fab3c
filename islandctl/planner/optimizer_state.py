"""What the inner optimizer keeps of every parameter, in fp32."""

from __future__ import annotations

import math

from islandctl.config.recipe import ModelRecipe
from islandctl.planner.parameters import Tensor, tensors

SHAMPOO_BLOCK = 1024
"""Side of the blocks that a matrix is cut into, as in Distributed Shampoo (Shi et al. 2023, arXiv 2309.06497)."""
SOAP_LARGEST = 10_000
"""Longer sides are left without a factor (SOAP, Vyas et al. 2024, arXiv 2409.11321; pytorch-optimizer's default)."""
ADAMW_BYTES = 8
"""Two moments."""
MOMENTUM_BYTES = 4
"""One moment."""


def state_bytes(model: ModelRecipe, kind: str) -> int:
    """Bytes over all ranks of a cell.

    ========  ======================================================================================
    adamw     8 a parameter
    muon      4 a parameter
    shampoo   8 a parameter, and for every block of r × c: two factors and two roots, 8·(r² + c²)
    soap      8 a parameter, and for every tensor: a factor and a basis for each side s, 8·Σ s²
    ========  ======================================================================================

    Norms, routers, the embedding and the head are AdamW's in all of them.

    Raises:
        ValueError: an optimizer that is not known.
    """
    if kind not in ("adamw", "muon", "shampoo", "soap"):
        raise ValueError(f"no state known for optimizer {kind}")
    return sum(tensor.number * _tensor_bytes(tensor, kind) for tensor in tensors(model))


def _tensor_bytes(tensor: Tensor, kind: str) -> int:
    values = math.prod(tensor.shape)
    if kind == "adamw" or tensor.kind in ("embedding", "norm", "router", "head"):
        return ADAMW_BYTES * values
    if kind == "muon":
        return MOMENTUM_BYTES * values
    if kind == "soap":
        return ADAMW_BYTES * values + 8 * sum(side**2 for side in tensor.shape if side <= SOAP_LARGEST)
    *stacked, rows, columns = tensor.shape
    return ADAMW_BYTES * values + math.prod(stacked) * _shampoo_bytes(rows, columns)


def _shampoo_bytes(rows: int, columns: int) -> int:
    """Factors and roots of one matrix, cut into blocks whose last row and column may be smaller."""
    down, across = _sides(rows), _sides(columns)
    left = len(across) * sum(side**2 for side in down)
    right = len(down) * sum(side**2 for side in across)
    return 8 * (left + right)


def _sides(length: int) -> list[int]:
    full, rest = divmod(length, SHAMPOO_BLOCK)
    return [SHAMPOO_BLOCK] * full + [rest] * (rest > 0)
