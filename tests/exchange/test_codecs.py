from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.errors import ConfigError, ExchangeError
from islandctl.exchange.codecs import CODECS, Int8, Key, codec_named, contraction, decode, encode
from islandctl.ledger.packet import digest

KEY = Key(seed=1, cell=2, fragment=3, window=4, chunk=5)


def some(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", CODECS)
@given(count=st.integers(0, 700), scale=st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e30]), seed=st.integers(0, 99))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_round_trip_is_near_and_repeats(name: str, count: int, scale: float, seed: int) -> None:
    values = some(count, seed, scale)
    payload = encode(codec_named(name), values, KEY)
    assert payload == encode(codec_named(name), values.clone(), KEY)
    decoded = decode(payload)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    if count == 0 or scale < 1e-37:  # subnormal scales have few bits; only the largest value bounds the error
        assert torch.isfinite(decoded).all()
        return
    bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 1.01 / 127}[name] * float(values.abs().max())
    assert float((decoded - values).abs().max()) <= bound


def test_golden_bytes() -> None:
    """The same bits on every machine: these hashes must never change."""
    numbers = (np.arange(1, 1001, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(2**24)
    values = torch.from_numpy(numbers.astype(np.float32) / np.float32(2**20) - np.float32(8))
    assert {name: digest(encode(codec, values, KEY))[:16] for name, codec in CODECS.items()} == GOLDEN


GOLDEN = {"fp32": "2e39da2a601b08ae", "bf16": "666b0469f4a8b313", "int8": "378e3b65c00a085f"}


def test_bf16_agrees_with_torch() -> None:
    values = some(5000)
    assert torch.equal(decode(encode(CODECS["bf16"], values, KEY)), values.bfloat16().float())


def test_bf16_never_becomes_infinite() -> None:
    values = torch.tensor([3.4028e38, -3.4028e38])
    assert torch.isfinite(decode(encode(CODECS["bf16"], values, KEY))).all()


def test_int8_is_unbiased() -> None:
    """Mean over many keys: |z| < 5 for every value."""
    values = some(256) * torch.logspace(-3, 0, 256)
    num_keys = 4000
    decoded = torch.stack(
        [decode(encode(CODECS["int8"], values, replace(KEY, window=window))).double() for window in range(num_keys)]
    )
    (scale,) = np.frombuffer(encode(CODECS["int8"], values, KEY)[16:18], dtype="<u2").astype(np.uint32) << 16
    quantum = float(np.uint32(scale).view(np.float32))
    assert float(values.abs().max()) / 127 <= quantum <= float(values.abs().max()) / 127 * 1.01
    assert float((decoded - values).abs().max()) <= quantum
    fraction = (values.double() / quantum) % 1
    sigma = quantum * (fraction * (1 - fraction)).sqrt().clamp(min=0.02) / math.sqrt(num_keys)
    assert float(((decoded.mean(0) - values).abs() / sigma).max()) < 5


def test_int8_leaves_the_grid_alone() -> None:
    scale = torch.tensor(0.0123).bfloat16().float()
    grid = torch.arange(-127, 128, dtype=torch.float32) * scale
    for window in range(200):
        assert torch.equal(decode(encode(CODECS["int8"], grid, replace(KEY, window=window))), grid)


def test_int8_error_is_within_the_bound() -> None:
    rho = contraction(256, 127)
    assert rho < 0.005
    worst = torch.full((256,), 0.5 / 127)  # half a quantum everywhere but at the largest value
    worst[0] = 1.0
    errors = [
        float(((decode(encode(CODECS["int8"], worst, replace(KEY, window=window))) - worst) ** 2).sum())
        for window in range(500)
    ]
    assert np.mean(errors) <= rho * float((worst**2).sum()) * 1.05


def test_error_feedback_stays_bounded_and_loses_nothing() -> None:
    residual = torch.zeros(256)
    sent, learnt = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    largest = 0.0
    for window in range(1000):
        delta = some(256, window)
        vector = delta + residual
        decoded = decode(encode(CODECS["int8"], vector, replace(KEY, window=window)))
        residual = vector - decoded
        sent += decoded.double()
        learnt += delta.double()
        largest = max(largest, float(residual.norm()) / 16)
    rho = contraction(256, 127)
    assert largest < 2 * math.sqrt(rho) / (1 - math.sqrt(rho))
    assert torch.allclose(sent + residual.double(), learnt, atol=1e-3)


def test_zero_blocks_stay_zero_and_keys_differ() -> None:
    values = torch.cat([torch.zeros(256), some(256)])
    payload = encode(CODECS["int8"], values, KEY)
    assert torch.equal(decode(payload)[:256], torch.zeros(256))
    others = [replace(KEY, **{name: 9}) for name in ("seed", "cell", "fragment", "window", "chunk")]
    assert len({payload, *(encode(CODECS["int8"], values, key) for key in others)}) == 6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(ExchangeError, match="fragment 3, window 4, chunk 5"):
        encode(CODECS[name], torch.tensor([1.0, bad]), KEY)


@pytest.mark.parametrize("name", CODECS)
def test_damaged_payloads_are_refused(name: str) -> None:
    payload = encode(CODECS[name], some(300), KEY)
    for damaged in (
        b"",
        payload[:10],
        payload[:-1],
        payload + b"x",
        b"X" + payload[1:],
        payload[:5] + b"\xff" + payload[6:],
    ):
        with pytest.raises(ExchangeError):
            decode(damaged)


def test_decoded_values_that_are_not_finite_are_refused() -> None:
    payload = bytearray(encode(CODECS["fp32"], torch.ones(1), KEY))
    payload[-4:] = np.array([np.nan], dtype="<f4").tobytes()
    with pytest.raises(ExchangeError, match="not finite"):
        decode(bytes(payload))


def test_unknown_codec() -> None:
    with pytest.raises(ConfigError, match="int3"):
        codec_named("int3")


def test_block_of_int8_contracts() -> None:
    assert Int8().block - 1 < 8 * Int8().levels ** 2
    assert contraction(392, 7) < 1 < contraction(394, 7)
