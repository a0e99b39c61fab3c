"""int8 and int4: unbiased, idempotent on the grid, within the bound; blocks of any length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.codec import FACTS, CodecName, contraction
from islandctl.exchange.codecs import Key, codec_named, decode, encode

KEY = Key(seed=1, cell=2, fragment=3, window=4, chunk=5)
GRIDS = pytest.mark.parametrize("name", ["int8", "int4"])


def some(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def repeated(name: str, values: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Decoded under ``num_keys`` keys, (keys, values), fp64."""
    codec = codec_named(name, block=len(values))
    found = torch.empty(num_keys, len(values))
    for window, row in enumerate(found):
        decode(encode(codec, values, replace(KEY, window=window)), row)
    return found.double()


def quantum(name: str, values: torch.Tensor) -> float:
    payload = encode(codec_named(name, block=len(values)), values, KEY)
    return float((np.frombuffer(payload[16:18], dtype="<u2").astype(np.uint32) << 16).view(np.float32)[0])


@pytest.mark.slow
@GRIDS
def test_unbiased_and_within_one_quantum(name: CodecName) -> None:
    """Over 20,000 keys the mean of every value is its own, |z| < 5; values down to 1/10,000 of the largest."""
    values = some(128).abs().clamp(min=0.1) * torch.logspace(-4, 0, 128) * some(128, 1).sign()
    decoded, step = repeated(name, values, 20_000), quantum(name, values)
    levels = FACTS[name].levels
    assert float(values.abs().max()) / levels <= step <= float(values.abs().max()) / levels * 1.01
    assert float((decoded - values).abs().max()) < step
    fraction = (values.double() / step) % 1
    sigma = step * (fraction * (1 - fraction)).sqrt() / math.sqrt(20_000)
    assert float(((decoded.mean(0) - values).abs() / sigma).max()) < 5


@GRIDS
def test_neighbours_are_rounded_independently(name: CodecName) -> None:
    values = torch.full((128,), 0.5 / FACTS[name].levels)
    values[0] = 1.0
    errors = (repeated(name, values, 2_000) - values.double())[:, 1:]
    correlation = torch.corrcoef(errors.T).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(2_000)


@GRIDS
@given(
    codes=st.lists(st.integers(-127, 127), min_size=1, max_size=300),
    mantissa=st.integers(128, 255),
    exponent=st.integers(-126, 100),
    window=st.integers(0, 2**31),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_grid_is_left_alone(name: CodecName, codes: list[int], mantissa: int, exponent: int, window: int) -> None:
    levels = FACTS[name].levels
    q = torch.tensor([math.remainder(code, 2 * levels + 1) for code in codes], dtype=torch.float64)
    q[0] = levels
    grid = (q * mantissa * 2.0**exponent / 128).float()
    for rounding in ("stochastic", "nearest"):
        codec = codec_named(name, block=300, rounding=rounding)
        assert torch.equal(decode(encode(codec, grid, replace(KEY, window=window))), grid)


@GRIDS
@given(count=st.integers(1, 500), block=st.integers(4, 392), seed=st.integers(0, 99))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_what_was_decoded_is_encoded_without_loss(name: CodecName, count: int, block: int, seed: int) -> None:
    codec = codec_named(name, block=block)
    once = decode(encode(codec, some(count, seed), KEY))
    largest = torch.stack([part.abs().max() for part in once.split(block)])
    # Where rounding took the largest value down a level, the second scale is another one.
    kept = [i for i, part in enumerate(some(count, seed).split(block)) if largest[i] >= part.abs().max()]
    again = decode(encode(codec, once, replace(KEY, window=9)))
    for i in kept:
        assert torch.equal(once.split(block)[i], again.split(block)[i])


@GRIDS
@pytest.mark.parametrize("block", [128, 256])
def test_error_is_within_the_bound(name: CodecName, block: int) -> None:
    levels = FACTS[name].levels
    worst = torch.full((block,), 0.5 / levels)  # half a quantum everywhere but at the largest value
    worst[0] = 1.0
    rho = contraction(block, levels)
    for values in (worst, some(block), some(block) ** 3):
        error = ((repeated(name, values, 500) - values.double()) ** 2).sum(1).mean()
        assert float(error) <= rho * float((values.double() ** 2).sum()) * 1.05


def test_contraction_ends_at_392() -> None:
    assert contraction(392, 7) < 1 <= contraction(393, 7)
    assert contraction(256, 127) < 0.005


@GRIDS
def test_zero_blocks_stay_zero(name: CodecName) -> None:
    codec = codec_named(name)
    values = torch.cat([torch.zeros(codec.block), some(codec.block), torch.zeros(codec.block)])
    values[0] = -0.0
    decoded = decode(encode(codec, values, KEY))
    assert not decoded[: codec.block].any()
    assert not decoded[2 * codec.block :].any()
    assert decoded[codec.block : 2 * codec.block].any()


@GRIDS
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_values_within_one_quantum(name: CodecName, listed: list[float]) -> None:
    """Subnormal, huge, mixed: a reader is never off by more than one step, and nothing overflows into a neighbour."""
    values = torch.tensor(listed, dtype=torch.float32)
    step = quantum(name, values) if len(values) >= 4 else None
    decoded = decode(encode(codec_named(name, block=max(4, len(values))), values, KEY))
    assert torch.isfinite(decoded).all()
    if step is not None:
        within = values.double().clamp(-(2.0**127), 2.0**127)
        assert float((decoded.double() - within).abs().max()) <= max(step, 2.0**-133)


def test_nearest_is_nearest() -> None:
    values = some(10_000)
    codec = codec_named("int4", rounding="nearest")
    payload = encode(codec, values, KEY)
    assert payload == encode(codec, values, replace(KEY, window=5))
    scales = (np.frombuffer(payload[16 : 16 + 2 * 79], dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    step = torch.from_numpy(np.repeat(scales, 128)[:10_000].copy())
    assert bool(((decode(payload) - values).abs() <= step * 0.5001).all())
