"""What the inner optimizer keeps of every parameter, in fp32, on each rank and over all of them.

FSDP2 cuts a tensor along its first dimension; Shampoo and SOAP precondition what a rank has (its own rows, its own
experts), so the columns' matrices exist on every rank, and the sum grows with the number of ranks.
"""

from __future__ import annotations

import math

from islandctl.config.recipe import ModelRecipe, Optimizer
from islandctl.planner.parameters import Tensor, tensors

SHAMPOO_BLOCK = 1024
"""Side of the blocks that a matrix is cut into, as in Distributed Shampoo (Shi et al. 2023, arXiv 2309.06497)."""
SOAP_LARGEST = 10_000
"""Longer sides are left without a factor (SOAP, Vyas et al. 2024, arXiv 2409.11321; pytorch-optimizer's default)."""
ADAMW_BYTES = 8
"""Two moments."""
MOMENTUM_BYTES = 4
"""One moment."""


def rank_bytes(model: ModelRecipe, optimizer: Optimizer, num_ranks: int) -> int:
    """Bytes on the rank that holds the most.

    ========  ==========================================================================================
    adamw     8 a parameter
    muon      4 a parameter
    shampoo   8 a parameter, and for every block of r × c (at most 1024 a side): 8·(r² + c²), two factors
              and two roots
    soap      8 a parameter, and for every matrix of r × c: 8·(r² + c²), two covariances and two bases,
              sides beyond 10,000 left out
    ========  ==========================================================================================

    Norms, routers, the embedding and the head are AdamW's in all of them.
    """
    return sum(
        tensor.number * _part_bytes(tensor, -(-tensor.shape[0] // num_ranks), optimizer) for tensor in tensors(model)
    )


def cell_bytes(model: ModelRecipe, optimizer: Optimizer, num_ranks: int) -> int:
    """Bytes over all ranks of a cell: what a checkpoint holds."""
    total = 0
    for tensor in tensors(model):
        length = -(-tensor.shape[0] // num_ranks)
        full, rest = divmod(tensor.shape[0], length)
        whole = full * _part_bytes(tensor, length, optimizer)
        total += tensor.number * (whole + (_part_bytes(tensor, rest, optimizer) if rest else 0))
    return total


def _part_bytes(tensor: Tensor, length: int, optimizer: Optimizer) -> int:
    """Bytes for one tensor's part of ``length`` along its first dimension."""
    shape = (length, *tensor.shape[1:])
    values = math.prod(shape)
    if optimizer.kind == "adamw" or tensor.kind in ("embedding", "norm", "router", "head"):
        return ADAMW_BYTES * values
    if optimizer.kind == "muon":
        return MOMENTUM_BYTES * values
    *stacked, rows, columns = shape
    if optimizer.kind == "shampoo":
        squares = _shampoo_values(rows, columns, optimizer.block or SHAMPOO_BLOCK)
    else:
        squares = _soap_values(rows, columns)
    return ADAMW_BYTES * values + 8 * math.prod(stacked) * squares


def _soap_values(rows: int, columns: int) -> int:
    return sum(side**2 for side in (rows, columns) if side <= SOAP_LARGEST)


def _shampoo_values(rows: int, columns: int, block: int) -> int:
    """r² + c² over the blocks of one matrix, whose last row and column may be smaller."""
    down, across = _sides(rows, block), _sides(columns, block)
    return len(across) * sum(side**2 for side in down) + len(down) * sum(side**2 for side in across)


def _sides(length: int, block: int) -> list[int]:
    full, rest = divmod(length, block)
    return [block] * full + [rest] * (rest > 0)
