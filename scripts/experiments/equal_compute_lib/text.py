"""The text: Python's own sources, split and dealt out by the worker's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from islandctl.config.recipe import DataRecipe
from islandctl.worker.data import STDLIB, Sequences, Text, held_out_sequences, read_text


@cache
def text(sequence: int, path: str = STDLIB) -> Text:
    """Training and held-out part."""
    return read_text(DataRecipe(paths=(path,)), sequence=sequence)


def held_out(sequence: int, count: int) -> Tensor:
    """(count, sequence + 1) int64."""
    return held_out_sequences(text(sequence).held_out, sequence=sequence, count=count)


def batches(*, sequence: int, batch: int, cells: int, seed: int, skip: int = 0) -> Iterator[Tensor]:
    """Without end, (C, batch / C, sequence + 1) a step. The cells' parts together are one cell's batch.

    Args:
        batch: over all cells.
        skip: sequences that were taken before, over all cells.
    """
    shares = [
        Sequences(text(sequence).training, sequence=sequence, seed=seed, cell=cell, num_cells=cells)
        for cell in range(cells)
    ]
    for share in shares:
        share.consumed = skip // cells
    while True:
        yield torch.stack([share.take(batch // cells) for share in shares])
