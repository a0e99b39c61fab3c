from __future__ import annotations

import numpy as np
import pytest
import torch

from islandctl.config.exchange import Outer
from islandctl.exchange.outer import (
    Average,
    DelayedNesterov,
    Nesterov,
    OuterOptimizer,
    outer_optimizer,
    weighted_mean,
)
from islandctl.ledger.packet import digest


def golden(count: int, factor: int) -> torch.Tensor:
    """Values with full mantissas from integer arithmetic only."""
    numbers = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(factor)) % np.uint64(2**24)
    return torch.from_numpy(numbers.astype(np.float32) / np.float32(2**20) - np.float32(8))


NESTEROV = Nesterov(lr=0.7, decay=0.9)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (NESTEROV, "b11278d60c8147861dba4e325d954885a15c013c39c70f73b3a7147d40e08a6b"),
        (
            DelayedNesterov(lr=0.7, decay=0.9, delay=2),
            "4f603c4f852cb7a1c25b8707753a708767e488ab6012c2d294047df441b098d0",
        ),
    ],
    ids=["nesterov", "delayed"],
)
def test_golden_vectors(optimizer: OuterOptimizer, expected: str) -> None:
    """Five steps give the same bits on every processor: a fused operation anywhere would change this hash."""
    anchor, state = golden(1001, 2654435761), optimizer.first_state(1001)
    for step in range(5):
        parts = [golden(1001, 40503 + 2 * step), golden(1001, 69069 + 2 * step), golden(1001, 12345 + 2 * step)]
        anchor, state = optimizer.step(anchor, state, weighted_mean(parts, [1000, 1024, 999]))
    kept = b"".join(state[name].numpy().tobytes() for name in state)
    assert digest(anchor.numpy().tobytes() + kept) == expected


def test_nesterov_matches_exact_arithmetic() -> None:
    """Against numpy's separately rounded fp32, value by value."""
    f = np.float32
    anchor, momentum, one, two = (golden(50, k) for k in (3, 5, 7, 11))
    mean = weighted_mean([one, two], [100, 300])
    moved_anchor, moved = NESTEROV.step(anchor, {"momentum": momentum}, mean)
    for index in range(50):
        a, m, x, y = (f(each[index].item()) for each in (anchor, momentum, one, two))
        g = f(f(x * f(0.25)) + f(y * f(0.75)))
        v = f(f(m * f(0.9)) + g)
        assert moved["momentum"][index].item() == v
        assert moved_anchor[index].item() == f(a - f(f(g + f(v * f(0.9))) * f(0.7)))


def published(start: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float, delay: int) -> np.ndarray:
    """Delayed Nesterov as printed (arXiv 2401.09135), in float64, with c = 0: positions after each gradient."""
    theta, m, aggregated, positions = start.astype(np.float64), np.zeros(len(start)), np.zeros(len(start)), []
    for t, g in enumerate(gradients):
        aggregated = aggregated + g
        if (t + 1) % delay == 0:
            m = decay * m + aggregated / delay
            theta = theta - lr * (decay * m + g / delay)
            aggregated = np.zeros(len(start))
        else:
            theta = theta - lr * (g / delay)
        positions.append(theta)
    return np.stack(positions)


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_delayed_follows_the_published_rule(delay: int) -> None:
    optimizer, random = DelayedNesterov(lr=0.7, decay=0.9, delay=delay), np.random.default_rng(delay)
    start = random.standard_normal(64).astype(np.float32)
    gradients = [random.standard_normal(64).astype(np.float32) for _ in range(4 * delay + 2)]
    anchor, state, found = torch.from_numpy(start), optimizer.first_state(64), []
    for gradient in gradients:
        anchor, state = optimizer.step(anchor, state, torch.from_numpy(gradient))
        found.append(anchor.numpy())
    expected = published(start, [g.astype(np.float64) for g in gradients], 0.7, 0.9, delay)
    np.testing.assert_allclose(np.stack(found), expected, rtol=0, atol=2e-5)
    assert int(state["held"]) == len(gradients) % delay


def test_delayed_by_one_is_nesterov() -> None:
    delayed, anchors = DelayedNesterov(lr=0.7, decay=0.9, delay=1), [golden(100, 3), golden(100, 3)]
    states = [NESTEROV.first_state(100), delayed.first_state(100)]
    for factor in (5, 7, 11):
        anchors[0], states[0] = NESTEROV.step(anchors[0], states[0], golden(100, factor))
        anchors[1], states[1] = delayed.step(anchors[1], states[1], golden(100, factor))
    assert torch.equal(*anchors)
    assert torch.equal(states[0]["momentum"], states[1]["momentum"])


@pytest.mark.parametrize(
    "optimizer", [NESTEROV, Average(), DelayedNesterov(0.7, 0.9, 1), DelayedNesterov(0.7, 0.9, 3)]
)
def test_arguments_stay(optimizer: OuterOptimizer) -> None:
    anchor, mean, state = torch.ones(3), torch.ones(3), optimizer.first_state(3)
    optimizer.step(anchor, state, mean)
    assert torch.equal(torch.stack([anchor, mean]), torch.ones(2, 3))
    assert all(not tensor.any() for tensor in state.values())


def test_average_of_one_cell_moves_the_anchor_onto_its_value() -> None:
    value, anchor = golden(100, 3), golden(100, 5)
    moved, state = Average().step(anchor, {}, weighted_mean([anchor - value], [7]))
    assert torch.equal(moved, anchor - (anchor - value))
    assert state == {}


def test_average_is_nesterov_with_rate_one_and_no_momentum() -> None:
    anchor, mean = golden(100, 3), golden(100, 5)
    plain = Nesterov(lr=1.0, decay=0.0)
    assert torch.equal(Average().step(anchor, {}, mean)[0], plain.step(anchor, plain.first_state(100), mean)[0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Outer(), Nesterov(0.7, 0.9)),
        (Outer(lr=0.5, momentum=0.0), Nesterov(0.5, 0.0)),
        (Outer(kind="average"), Average()),
        (Outer(kind="delayed", delay=4, momentum=0.8), DelayedNesterov(0.7, 0.8, 4)),
    ],
)
def test_the_recipe_names_one(settings: Outer, expected: OuterOptimizer) -> None:
    assert outer_optimizer(settings) == expected


@pytest.mark.parametrize("tokens", [[0, 0], [5, 5]])
def test_nothing_trained_means_equal_weights(tokens: list[int]) -> None:
    assert torch.equal(weighted_mean([torch.tensor([1.0]), torch.tensor([3.0])], tokens), torch.tensor([2.0]))
