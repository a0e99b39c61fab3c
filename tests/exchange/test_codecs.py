"""What holds for every codec: the same bytes for the same key, near what was given, damage refused."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.codec import FACTS, Rounding, body_bytes
from islandctl.errors import ConfigError, ExchangeError
from islandctl.exchange.codecs import Key, codec_named, decode, encode
from islandctl.exchange.codecs.base import TILE
from islandctl.ledger.packet import PacketHeader, digest, pack, unpack

KEY = Key(seed=1, cell=2, fragment=3, window=4, chunk=5)
NEAREST = pytest.mark.parametrize(("name", "rounding"), [(name, None) for name in FACTS] + [("int4", "nearest")])
HEADER = 16


def some(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def plain_numbers() -> torch.Tensor:
    """1,000 values of [−8, 8) that need no random generator to be made again."""
    numbers = (np.arange(1, 1001, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(2**24)
    return torch.from_numpy(numbers.astype(np.float32) / np.float32(2**20) - np.float32(8))


@pytest.mark.parametrize("name", FACTS)
@given(count=st.integers(0, 700), scale=st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e30]), seed=st.integers(0, 99))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_round_trip_is_near_and_repeats(name: str, count: int, scale: float, seed: int) -> None:
    values = some(count, seed, scale)
    codec = codec_named(name)
    payload = encode(codec, values, KEY)
    assert payload == encode(codec, values.clone(), KEY)
    assert len(payload) == HEADER + body_bytes(codec.name, codec.block, count)
    decoded = decode(payload)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    if count == 0 or scale < 1e-37:  # subnormal scales have few bits; only the largest value bounds the error
        assert torch.isfinite(decoded).all()
        return
    bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 1.01 / 127, "int4": 1.01 / 7, "2bit": 0.7}[name]
    assert float((decoded - values).abs().max()) <= bound * float(values.abs().max())


GOLDEN = {
    "fp32": "ac418f3291534a0a",
    "bf16": "6277f0ef21f024d3",
    "int8": "3e1d555948db1d6a",
    "int4": "4979d5b2bf344d0a",
    "2bit": "70d404a974f72a98",
}


def test_golden_bytes() -> None:
    """The same bytes on every machine: these hashes must never change within a format version."""
    values = plain_numbers()
    assert {name: digest(encode(codec_named(name), values, KEY))[:16] for name in FACTS} == GOLDEN


VECTORS = {
    "fp32": (
        ("49534c430201000009000000000000002866c1bfebdbb5be65f04c3f6067fa3f0f2a0ec0f06488bfd5a3b83d6b799f3f4cb41940"),
        "2866c1bfebdbb5be65f04c3f6067fa3f0f2a0ec0f06488bfd5a3b83d6b799f3f4cb41940",
    ),
    "bf16": (
        "49534c43020200000900000000000000c1bfb6be4d3ffa3f0ec088bfb93d9f3f1a40",
        "0000c1bf0000b6be00004d3f0000fa3f00000ec0000088bf0000b93d00009f3f00001a40",
    ),
    "int8": (
        "49534c430203000109000000000000009b3c306daae70a4784c2ff",
        "00c0c1bf0010b8be00704b3f0074f93f00e40ec0000c8abf00009b3d00d89f3f00ca1940",
    ),
    "int4": (
        "49534c43020480000900000000000000b03e74ea51c80f",
        "0000b0bf0000b0be0000303f0000044000001ac0000084bf000000000000b03f00001a40",
    ),
    "2bit": (
        "49534c430205400009000000000000002e3fe4a403",
        "008002c000002ebf00002e3f00800240008002c000002ebf00002e3f00002e3f00800240",
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_golden_vectors(name: str) -> None:
    """A payload in hex, and the bits that every reader finds in it."""
    payload, values = (bytes.fromhex(part) for part in VECTORS[name])
    assert decode(payload).numpy().astype("<f4").tobytes() == values
    assert encode(codec_named(name), plain_numbers()[:9] / 3, KEY) == payload


def test_another_process_writes_the_same_bytes() -> None:
    program = (
        "import torch, sys, hashlib; from islandctl.exchange.codecs import *; torch.set_num_threads(1)\n"
        "values = torch.arange(-3000, 3000).float() / 7\n"
        "for name in sys.argv[1:]:\n"
        "    print(hashlib.sha256(encode(codec_named(name), values, Key(1, 2, 3, 4, 5))).hexdigest())\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, *FACTS], cwd=Path(__file__).parents[2], capture_output=True, check=True
    )
    values = torch.arange(-3000, 3000).float() / 7
    here = [hashlib.sha256(encode(codec_named(name), values, KEY)).hexdigest() for name in FACTS]
    assert told.stdout.decode().split() == here


@NEAREST
@pytest.mark.parametrize("count", [1, 5, 255, 2 * TILE + 129])
def test_a_room_is_filled_and_what_is_encoded_is_left_alone(name: str, rounding: Rounding | None, count: int) -> None:
    values, before = some(count), some(count)
    payload = encode(codec_named(name, rounding=rounding), values, KEY)
    room = torch.full((count,), math.nan)
    assert decode(payload, room) is room
    assert torch.equal(room, decode(payload))
    assert torch.equal(values, before)


def test_bits_do_not_depend_on_the_tile() -> None:
    """The random bits of a value follow from the key and its place alone."""
    values = some(TILE + 300)
    for name in FACTS:
        codec = codec_named(name)
        whole = decode(encode(codec, values, KEY))
        start = decode(encode(codec, values[:1024], KEY))
        assert torch.equal(whole[:1024], start)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_part_of_the_key_counts(name: str) -> None:
    values = some(256)
    others = [replace(KEY, **{part: 9}) for part in ("seed", "cell", "fragment", "window", "chunk")]
    assert len({encode(codec_named(name), values, key) for key in (KEY, *others)}) == 6


def test_bf16_agrees_with_torch() -> None:
    values = some(5000)
    assert torch.equal(decode(encode(codec_named("bf16"), values, KEY)), values.bfloat16().float())


@pytest.mark.parametrize("name", FACTS)
def test_nothing_becomes_infinite(name: str) -> None:
    values = torch.tensor([3.4028e38, -3.4028e38, 1.0, 0.0])
    decoded = decode(encode(codec_named(name), values, KEY))
    assert torch.isfinite(decoded).all()
    assert torch.equal(decoded[:2].sign(), values[:2].sign())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FACTS)
def test_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(ExchangeError, match="fragment 3, window 4, chunk 5"):
        encode(codec_named(name), torch.tensor([1.0, bad]), KEY)


@pytest.mark.parametrize("name", FACTS)
def test_damaged_payloads_are_refused(name: str) -> None:
    payload = encode(codec_named(name), some(300), KEY)
    damaged = [b"", payload[:10], payload[:-1], payload + b"x"]
    for place in range(6):  # magic, version, codec number
        damaged += [payload[:place] + bytes([payload[place] ^ 1 << bit]) + payload[place + 1 :] for bit in range(8)]
    damaged.append(payload[:7] + b"\x80" + payload[8:])  # the block length's upper byte
    damaged += [payload[:place] + b"\x7f" + payload[place + 1 :] for place in range(9, 16)]  # the count's
    for one in damaged:
        with pytest.raises(ExchangeError):
            decode(one)


@pytest.mark.parametrize("name", FACTS)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_flipped_bit_of_a_packet_is_refused(name: str, place: int, bit: int) -> None:
    payload = encode(codec_named(name), some(300), KEY)
    header = PacketHeader(
        run="r", config_hash="c" * 64, attempt=1, cell=2, fragment=3, window=4, chunk=5, num_chunks=6, version=0,
        base="b" * 64, step=1, tokens=1, codec=name, payload_hash=digest(payload), payload_bytes=len(payload),
    )  # fmt: skip
    packet = bytearray(pack(header, payload))
    assert unpack(bytes(packet))[1] == payload
    named = digest(bytes(packet))
    packet[-1 - place % len(payload)] ^= 1 << bit  # in the payload the packet tells; the commit's hash tells anywhere
    with pytest.raises(Exception, match="payload"):
        unpack(bytes(packet))
    assert digest(bytes(packet)) != named


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "2bit"])
def test_decoded_values_that_are_not_finite_are_refused(name: str) -> None:
    payload = bytearray(encode(codec_named(name), torch.ones(1), KEY))
    width = 4 if name == "fp32" else 2  # of the value, or of its scale
    payload[HEADER + width - 2 : HEADER + width] = b"\x80\x7f"
    with pytest.raises(ExchangeError, match="not finite"):
        decode(bytes(payload))


def test_a_room_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ExchangeError, match="3 values do not fit a room for 4"):
        decode(encode(codec_named("int4"), torch.ones(3), KEY), torch.empty(4))


def test_unknown_codec() -> None:
    with pytest.raises(ConfigError, match="int3"):
        codec_named("int3")


@pytest.mark.parametrize(
    ("name", "block", "rounding", "said"),
    [
        ("int4", 393, None, "n - 1 < 8 L² .L = 7., so at most 392"),
        ("int4", 3, "nearest", "4 to 65,535"),
        ("int8", 70_000, None, "4 to 65,535"),
        ("2bit", None, "stochastic", "rounds to nearest only"),
        ("bf16", None, "stochastic", "no grid"),
        ("fp32", 128, None, "no scales"),
    ],
)
def test_what_a_codec_cannot_do(name: str, block: int | None, rounding: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        codec_named(name, block=block, rounding=rounding)


def test_what_it_can() -> None:
    assert codec_named("int4", block=392).block == 392
    assert codec_named("int4", block=4096, rounding="nearest").block == 4096
