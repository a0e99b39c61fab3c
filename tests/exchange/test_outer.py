from __future__ import annotations

import numpy as np
import pytest
import torch

from islandctl.exchange.outer import nesterov, weighted_mean
from islandctl.ledger.packet import digest


def golden(count: int, factor: int) -> torch.Tensor:
    """Values with full mantissas from integer arithmetic only."""
    numbers = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(factor)) % np.uint64(2**24)
    return torch.from_numpy(numbers.astype(np.float32) / np.float32(2**20) - np.float32(8))


def test_golden_vectors() -> None:
    """Five steps give the same bits on every processor: a fused operation anywhere would change this hash."""
    anchor, momentum = golden(1001, 2654435761), torch.zeros(1001)
    for step in range(5):
        parts = [golden(1001, 40503 + 2 * step), golden(1001, 69069 + 2 * step), golden(1001, 12345 + 2 * step)]
        mean = weighted_mean(parts, [1000, 1024, 999])
        anchor, momentum = nesterov(anchor, momentum, mean, lr=0.7, decay=0.9)
    assert digest(anchor.numpy().tobytes() + momentum.numpy().tobytes()) == HASH


HASH = "b11278d60c8147861dba4e325d954885a15c013c39c70f73b3a7147d40e08a6b"


def test_matches_exact_arithmetic() -> None:
    """Against numpy's separately rounded fp32, value by value."""
    f = np.float32
    anchor, momentum, one, two = (golden(50, k) for k in (3, 5, 7, 11))
    mean = weighted_mean([one, two], [100, 300])
    moved_anchor, moved = nesterov(anchor, momentum, mean, lr=0.7, decay=0.9)
    for index in range(50):
        a, m, x, y = (f(each[index].item()) for each in (anchor, momentum, one, two))
        g = f(f(x * f(0.25)) + f(y * f(0.75)))
        v = f(f(m * f(0.9)) + g)
        assert moved[index].item() == v
        assert moved_anchor[index].item() == f(a - f(f(g + f(v * f(0.9))) * f(0.7)))


def test_arguments_stay() -> None:
    anchor, momentum, mean = torch.ones(3), torch.ones(3), torch.ones(3)
    nesterov(anchor, momentum, mean, lr=0.7, decay=0.9)
    assert torch.equal(torch.stack([anchor, momentum, mean]), torch.ones(3, 3))


def test_one_cell_without_momentum_moves_the_anchor_onto_its_value() -> None:
    value, anchor = golden(100, 3), golden(100, 5)
    mean = weighted_mean([anchor - value], [7])
    moved, _ = nesterov(anchor, torch.zeros(100), mean, lr=1.0, decay=0.0)
    assert torch.equal(moved, anchor - (anchor - value))


@pytest.mark.parametrize("tokens", [[0, 0], [5, 5]])
def test_nothing_trained_means_equal_weights(tokens: list[int]) -> None:
    assert torch.equal(weighted_mean([torch.tensor([1.0]), torch.tensor([3.0])], tokens), torch.tensor([2.0]))
