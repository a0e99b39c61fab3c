"""int4's kernels against the CPU's codec: the same decoded bits, unbiased encoding.

They run on an accelerator, or under Triton's interpreter (`TRITON_INTERPRET=1`, Triton installed).
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace

import pytest
import torch

from islandctl.exchange.codecs import Key, codec_named, decode, encode

KEY = Key(seed=1, cell=2, fragment=3, window=4, chunk=5)
HEADER = 16
HERE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        HERE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no accelerator, nor Triton's interpreter"
    ),
]


def some(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def payload_of(values: torch.Tensor, block: int, key: Key = KEY, *, stochastic: bool = True) -> bytes:
    from islandctl.exchange.codecs.fused import encode_body

    body = encode_body(values.to(HERE), block, key, stochastic=stochastic)
    return encode(codec_named("int4", block=block), values, KEY)[:HEADER] + body.cpu().numpy().tobytes()


def decoded_there(payload: bytes, block: int, count: int) -> torch.Tensor:
    from islandctl.exchange.codecs.fused import decode_body

    out = torch.full((count,), math.nan, device=HERE)
    decode_body(torch.frombuffer(bytearray(payload[HEADER:]), dtype=torch.uint8).to(HERE), block, out)
    return out.cpu()


@pytest.mark.parametrize("block", [50, 128, 392])
@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 8e37])
def test_the_same_bits_as_the_cpu(count: int, block: int, scale: float) -> None:
    values = some(count, count, scale)
    nearest = encode(codec_named("int4", block=block, rounding="nearest"), values, KEY)
    assert payload_of(values, block, stochastic=False) == nearest  # scales, grid and layout
    for payload in (nearest, encode(codec_named("int4", block=block), values, KEY), payload_of(values, block)):
        assert torch.equal(decoded_there(payload, block, count), decode(payload))


def test_encoding_is_unbiased_and_repeats() -> None:
    """Every value stands in many blocks, each with random bits of its own: |z| < 5."""
    num_blocks = 20_000 if HERE == "cuda" else 300  # the interpreter takes 10 ms a block
    values = some(128).abs().clamp(min=0.1) * torch.logspace(-3, 0, 128) * some(128, 1).sign()
    payload = payload_of(values.repeat(num_blocks), 128)
    assert payload == payload_of(values.repeat(num_blocks), 128)
    assert payload != payload_of(values.repeat(num_blocks), 128, replace(KEY, window=5))
    decoded = decode(payload).view(num_blocks, 128).double()
    step = float(values.abs().max()) / 7
    bits = torch.frombuffer(bytearray(payload[HEADER : HEADER + 2]), dtype=torch.bfloat16)
    assert step <= float(bits[0]) <= step * 1.01
    fraction = (values.double() / float(bits[0])) % 1
    sigma = float(bits[0]) * (fraction * (1 - fraction)).sqrt() / math.sqrt(num_blocks)
    assert float(((decoded.mean(0) - values).abs() / sigma).max()) < 5
    assert float((decoded - values).abs().max()) < float(bits[0])


def test_the_grid_is_left_alone() -> None:
    grid = torch.arange(-7, 8).repeat(16)[:128].float() * 0.01171875
    payload = payload_of(grid.repeat(100), 128)
    assert torch.equal(decode(payload), grid.repeat(100))


@pytest.mark.skipif(HERE == "cpu", reason="no accelerator")
def test_the_codec_takes_tensors_of_the_accelerator() -> None:
    codec = codec_named("int4")
    vector, out = some(1000).to(HERE), torch.empty(1000, device=HERE)
    payload = encode(codec, vector, KEY)
    assert payload == encode(codec, vector, KEY)
    assert torch.equal(decode(payload, out).cpu(), decode(payload))
    for name in ("int4", "int8", "bf16"):
        told = encode(codec_named(name), vector, KEY)
        assert torch.equal(decode(told, out).cpu(), decode(told))
