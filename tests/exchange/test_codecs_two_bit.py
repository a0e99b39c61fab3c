"""2bit: fits each block best, contracts always, keeps what lies on its levels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.exchange.codecs import Key, codec_named, decode, encode

KEY = Key(seed=1, cell=2, fragment=3, window=4, chunk=5)
CODEC = codec_named("2bit")


def some(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def error(values: torch.Tensor, block: int = 64) -> float:
    """Relative squared error of the worst block."""
    decoded = decode(encode(codec_named("2bit", block=block), values, KEY))
    worst = 0.0
    for given_, found in zip(values.double().split(block), decoded.double().split(block), strict=True):
        square = float((given_**2).sum())
        worst = max(worst, float(((found - given_) ** 2).sum()) / square if square else float(found.abs().sum()))
    return worst


def test_a_bell_curve_loses_an_eighth() -> None:
    values = some(64_000)
    decoded = decode(encode(CODEC, values, KEY))
    assert 0.11 < float(((decoded - values) ** 2).sum() / (values**2).sum()) < 0.12


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=200),
    st.sampled_from([4, 5, 16, 64]),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_error_is_within_the_bound(listed: list[float], block: int) -> None:
    values = torch.tensor(listed, dtype=torch.float32)
    values[values.abs() < 1e-30] = 0.0
    assert error(values, block) <= max(0.25, (block - 1) / (block + 8)) + 1e-4


def test_the_bound_is_reached_by_a_single_value() -> None:
    values = torch.zeros(64)
    values[17] = -3.0
    assert error(values) == pytest.approx(63 / 72, abs=1e-4)


@given(
    levels=st.lists(st.sampled_from([-3.0, -1.0, 1.0, 3.0]), min_size=1, max_size=300),
    mantissa=st.integers(128, 255),
    exponent=st.integers(-120, 100),
    block=st.sampled_from([4, 7, 64, 128]),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_levels_are_left_alone(levels: list[float], mantissa: int, exponent: int, block: int) -> None:
    codec = codec_named("2bit", block=block)
    once = decode(encode(codec, torch.tensor(levels) * float(mantissa * 2.0**exponent), KEY))
    assert torch.equal(decode(encode(codec, once, KEY)), once)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=130))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_encoding_twice_is_encoding_once(listed: list[float]) -> None:
    once = decode(encode(CODEC, torch.tensor(listed, dtype=torch.float32), KEY))
    assert torch.isfinite(once).all()
    assert torch.equal(decode(encode(CODEC, once, KEY)), once)


@pytest.mark.parametrize("apart", [2**-23, 2**-12, 0.1])
def test_values_of_one_size_share_a_level(apart: float) -> None:
    """Some are beyond their root mean square, by next to nothing: that alone must not take them apart."""
    values = torch.ones(64)
    values[::2] += apart
    values[::3] *= -1
    assert error(values) <= apart**2 + 2**-16


def test_zero_blocks_stay_zero_and_a_short_block_has_its_own_fit() -> None:
    values = torch.cat([torch.zeros(64), some(64), torch.full((3,), 0.5)])
    decoded = decode(encode(CODEC, values, KEY))
    assert not decoded[:64].any()
    assert torch.equal(decoded[128:], values[128:])
