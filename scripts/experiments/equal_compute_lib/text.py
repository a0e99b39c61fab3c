"""The text: Python's own sources, split and dealt out by the worker's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from islandctl.config.recipe import DataRecipe
from islandctl.worker.data import Sequences, held_out_sequences
from islandctl.worker.text import Text, read_text
from scripts.experiments.equal_compute_lib.settings import Run


@cache
def text(path: str, sequence: int) -> Text:
    """Training and held-out part."""
    return read_text(DataRecipe(paths=(path,)), sequence=sequence)


def held_out(run: Run) -> Tensor:
    """(held_out, sequence + 1) int64."""
    sequence = run.model.sequence
    return held_out_sequences(text(run.text, sequence).held_out, sequence=sequence, count=run.held_out)


def batches(run: Run, *, batch: int, cells: int, skip: int = 0) -> Iterator[Tensor]:
    """Without end, (C, batch / C, sequence + 1) a step. The cells' parts together are one cell's batch.

    Args:
        batch: over all cells.
        skip: sequences that were taken before, over all cells.
    """
    sequence = run.model.sequence
    training = text(run.text, sequence).training
    shares = [
        Sequences(training, sequence=sequence, seed=run.seed, cell=cell, num_cells=cells) for cell in range(cells)
    ]
    for share in shares:
        share.consumed = skip // cells
    while True:
        yield torch.stack([share.take(batch // cells) for share in shares])
