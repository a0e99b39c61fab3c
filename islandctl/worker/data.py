"""The text dealt out to cells and ranks.

training text ── sequences, in an order of (seed, epoch) ── cell i of N takes i::N
"""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from islandctl.worker.text import Bytes, per_epoch


def cut(text: Bytes, indices: NDArray[np.int64], sequence: int) -> torch.Tensor:
    """The sequences with these numbers: (len(indices), sequence + 1) int64; the last byte is only predicted."""
    rows = indices[:, None] * sequence + np.arange(sequence + 1)[None, :]
    return torch.from_numpy(text[rows].astype(np.int64))


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a random order of 0 … size−1 puts these positions: a bijection without a table.

    A four-round Feistel network over the next even number of bits, walked until it falls inside (Black &
    Rogaway 2002). Integer arithmetic only: every machine and numpy version gets the same order.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        value = result[outside]
        left, right = value >> np.uint64(half), value & mask
        for number in range(4):
            left, right = right, left ^ (_mix(right, key * 4 + number) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(value: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = value + np.uint64((key + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class Sequences:
    """One cell's share of the training text, in order, with an exact place in it.

    Args:
        text: the training part.
        sequence: tokens per sequence.
        seed: of the recipe.
        cell, num_cells: this cell takes every num_cells-th sequence of the epoch's order.

    Raises:
        ConfigError: fewer sequences than cells.
    """

    def __init__(self, text: Bytes, *, sequence: int, seed: int, cell: int, num_cells: int) -> None:
        self.text, self.sequence, self.seed = text, sequence, seed
        self.cell, self.num_cells = cell, num_cells
        self.num_sequences = (len(text) - 1) // sequence
        self.per_epoch = per_epoch(text, sequence=sequence, num_cells=num_cells)
        self.consumed = 0

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Numbers of the sequences that this cell takes as its ``start``-th to ``stop``-th."""
        place = np.arange(start, stop, dtype=np.int64)
        epoch, position = place // self.per_epoch, place % self.per_epoch
        result = np.empty_like(place)
        for one in np.unique(epoch):
            key = int.from_bytes(blake3(f"{self.seed}/{one}".encode()).digest(7), "little")
            chosen = epoch == one
            dealt = position[chosen] * self.num_cells + self.cell
            result[chosen] = permute(dealt, self.num_sequences, key)
        return result

    def take(self, batch: int, *, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """The next ``batch`` sequences of the cell, of which this rank gets its part: (part, sequence + 1)."""
        low, high = batch * rank // num_ranks, batch * (rank + 1) // num_ranks
        numbers = self.numbers(self.consumed + low, self.consumed + high)
        self.consumed += batch
        return cut(self.text, numbers, self.sequence)

    def state_dict(self) -> dict[str, int]:
        """The cursor: epoch and position (sequences of this cell) in it."""
        return {"epoch": self.consumed // self.per_epoch, "position": self.consumed % self.per_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to a cursor that ``state_dict`` gave."""
        self.consumed = state_dict["epoch"] * self.per_epoch + state_dict["position"]


def held_out_sequences(text: Bytes, *, sequence: int, count: int) -> torch.Tensor:
    """At most ``count`` sequences, spread evenly over the held-out text: (count, sequence + 1) int64."""
    available = (len(text) - 1) // sequence
    count = min(count, available)
    return cut(text, np.arange(count, dtype=np.int64) * available // count, sequence)
