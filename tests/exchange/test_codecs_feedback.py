"""Error feedback: nothing is lost, and what is owed stays bounded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from islandctl.config.codec import FACTS, CodecName, contraction
from islandctl.exchange.codecs import Codec, Key, codec_named, decode, encode
from islandctl.exchange.feedback import left_out, owed

KEY = Key(seed=1, cell=2, fragment=3, window=0, chunk=5)


def sent(codec: Codec, vector: torch.Tensor, window: int) -> torch.Tensor:
    """What every reader of the window's packet finds."""
    return decode(encode(codec, vector, replace(KEY, window=window)))


def deltas(kind: str, window: int, count: int) -> torch.Tensor:
    if kind == "fixed":  # the same every time: what a rounding to nearest alone would never send
        return torch.linspace(0.001, 1, count)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(window))
    return noise**3 if kind == "heavy tails" else noise


@pytest.mark.parametrize("kind", ["fixed", "bell curve", "heavy tails"])
@pytest.mark.parametrize(
    ("name", "rounding"), [("int8", None), ("int4", None), ("int4", "nearest"), ("2bit", None), ("bf16", None)]
)
def test_the_sum_of_all_packets_and_the_residual_is_what_was_learnt(
    name: CodecName, rounding: str | None, kind: str
) -> None:
    codec = codec_named(name, rounding=rounding)
    residual = torch.zeros(300)
    told, learnt = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for window in range(300):
        delta = deltas(kind, window, 300)
        learnt += delta.double()
        vector = owed(delta, residual, 1.0)
        found = sent(codec, vector, window)
        residual = left_out(vector, found)
        told += found.double()
    assert torch.allclose(told + residual.double(), learnt, rtol=1e-5, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "bell curve", "heavy tails"])
@pytest.mark.parametrize("name", ["int8", "int4", "2bit"])
def test_the_residual_stays_bounded_over_ten_thousand_windows(name: CodecName, kind: str) -> None:
    """√(mean of ‖e‖²) ≤ G√ρ/(1 − β√ρ), with G the norm of the largest pseudo-gradient."""
    codec, facts, count = codec_named(name), FACTS[name], 256
    of_two_bits = (facts.block - 1) / (facts.block + 8)
    rho = of_two_bits if name == "2bit" else contraction(facts.block, facts.levels)
    beta = facts.feedback
    of_kind = [deltas(kind, window, count) for window in range(50)]
    largest = max(float(delta.norm()) for delta in of_kind)
    bound = largest * math.sqrt(rho) / (1 - beta * math.sqrt(rho))
    residual, squares = torch.zeros(count), []
    for window in range(10_000):
        vector = owed(of_kind[window % 50], residual, beta)
        residual = left_out(vector, sent(codec, vector, window))
        squares.append(float(residual.norm()) ** 2)
    assert math.sqrt(sum(squares[100:]) / len(squares[100:])) <= bound
    assert math.sqrt(max(squares)) <= 3 * bound
    assert sum(squares[-1000:]) <= 2 * sum(squares[100:1100]) + 1e-6  # it does not creep up either


def test_a_share_of_the_residual() -> None:
    vector = owed(torch.tensor([1.0, 2.0]), torch.tensor([0.5, -4.0]), 0.5)
    assert vector.tolist() == [1.25, 0.0]
    assert left_out(vector, torch.tensor([1.0, 0.5])).tolist() == [0.25, -0.5]
