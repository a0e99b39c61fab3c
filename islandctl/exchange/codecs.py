"""Codecs: fp32 values to bytes and back, the same bytes for the same key on every machine.

What a codec writes, all integers little-endian::

    b"ISLC"   magic
    u8        format version (1)
    u8        codec number
    u16       block length (0: none)
    u64       number of values
    body      fp32: the values; bf16: their upper halves; int8: bf16 scales of all blocks, then one byte a value

``fp32`` is exact. ``bf16`` rounds to nearest, ties to even: with error feedback what is rounded away goes with the
next packet, so it needs no randomness. ``int8`` rounds stochastically with random bits that are a function of the
key alone (Philox4x64 in counter mode): no random state is kept, and a packet that is sent again has the same bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from islandctl.errors import ConfigError, ExchangeError

MAGIC = b"ISLC"
FORMAT = 1
_HEADER = struct.Struct("<4sBBHQ")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Key:
    """What the random bits of one packet depend on."""

    seed: int
    cell: int
    fragment: int
    window: int
    chunk: int


class Codec(Protocol):
    """One way to write fp32 values."""

    @property
    def name(self) -> str:
        """As in the recipe."""

    @property
    def number(self) -> int:
        """As in the payload's header."""

    def write(self, values: Floats, key: Key) -> tuple[int, list[bytes]]:
        """Block length and the parts of the body for finite ``values``."""

    def read(self, body: memoryview, count: int, block: int) -> Floats:
        """The values; raises ``ValueError`` when the body does not fit ``count`` and ``block``."""


def _body(body: memoryview, dtype: str, count: int, offset: int = 0) -> npt.NDArray[np.generic]:
    if len(body) != offset + count * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(body)} bytes for {count} values")
    return np.frombuffer(body, dtype=dtype, count=count, offset=offset)


@dataclass(frozen=True)
class Fp32:
    """The values themselves: 32 bits each."""

    name: str = "fp32"
    number: int = 1

    def write(self, values: Floats, key: Key) -> tuple[int, list[bytes]]:
        return 0, [values.astype("<f4", copy=False).tobytes()]

    def read(self, body: memoryview, count: int, block: int) -> Floats:
        return _body(body, "<f4", count).astype(np.float32)


@dataclass(frozen=True)
class Bf16:
    """The upper 16 bits, rounded to nearest even; values beyond bf16's range go to its largest finite value."""

    name: str = "bf16"
    number: int = 2

    def write(self, values: Floats, key: Key) -> tuple[int, list[bytes]]:
        largest = torch.finfo(torch.bfloat16).max
        halves = torch.from_numpy(values).clamp(-largest, largest).to(torch.bfloat16)
        return 0, [halves.view(torch.int16).numpy().astype("<i2", copy=False).tobytes()]

    def read(self, body: memoryview, count: int, block: int) -> Floats:
        return _widen(_body(body, "<u2", count))


@dataclass(frozen=True)
class Int8:
    """Blockwise absmax with stochastic rounding: s = max|x|/127 in bf16, rounded up; q = clip(⌊x/s + u⌋, ±127).

    Unbiased; relative error E‖C(x)−x‖² ≤ ρ‖x‖² with ρ = (√(1 + (n−1)/L²) − 1)/2, see ``contraction``.
    """

    name: str = "int8"
    number: int = 3
    block: int = 256
    levels: int = 127

    def write(self, values: Floats, key: Key) -> tuple[int, list[bytes]]:
        num_blocks = -(-len(values) // self.block)
        padded = np.zeros(num_blocks * self.block, dtype=np.float32)
        padded[: len(values)] = values
        x_BN = padded.reshape(num_blocks, self.block)
        largest_B = np.abs(x_BN).max(axis=1)
        # Rounding the scale up never clips the largest value, so clipping cannot add a bias.
        bits_B = (largest_B / np.float32(self.levels)).view(np.uint32)
        scale_B = ((bits_B + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")
        divisor_B = _widen(scale_B)
        divisor_B[divisor_B == 0] = 1.0
        q_BN = x_BN / divisor_B[:, None]
        q_BN += _uniform(padded.size, key).reshape(num_blocks, self.block)
        np.floor(q_BN, out=q_BN)
        np.clip(q_BN, -self.levels, self.levels, out=q_BN)
        return self.block, [scale_B.tobytes(), q_BN.astype(np.int8).reshape(-1)[: len(values)].tobytes()]

    def read(self, body: memoryview, count: int, block: int) -> Floats:
        if block < 1:
            raise ValueError("no block length")
        num_blocks = -(-count // block)
        if len(body) != 2 * num_blocks + count:
            raise ValueError(f"{len(body)} bytes for {count} values")
        scale_B = _widen(np.frombuffer(body, dtype="<u2", count=num_blocks))
        q = np.frombuffer(body, dtype=np.int8, count=count, offset=2 * num_blocks).astype(np.float32)
        return q * np.repeat(scale_B, block)[:count]


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16(), Int8())}
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ``ConfigError`` when there is none."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError(f"exchange.codec: unknown codec '{name}'", hint=f"one of: {', '.join(CODECS)}") from None


def contraction(block: int, levels: int) -> float:
    """ρ, the bound on the relative squared error of stochastic rounding; error feedback contracts when ρ < 1."""
    return (math.sqrt(1 + (block - 1) / levels**2) - 1) / 2


def encode(codec: Codec, values: Tensor, key: Key) -> bytes:
    """The bytes of ``values``.

    Args:
        codec: how to write them.
        values: fp32, one dimension, on the CPU.
        key: what the random bits depend on.

    Raises:
        ExchangeError: a value is not finite.
    """
    array: Floats = np.ascontiguousarray(values.detach().numpy(), dtype=np.float32)
    if not np.isfinite(array).all():
        raise ExchangeError(
            f"cell {key.cell}, fragment {key.fragment}, window {key.window}, chunk {key.chunk}: "
            "a value is not finite; nothing was encoded"
        )
    block, parts = codec.write(array, key)
    return b"".join([_HEADER.pack(MAGIC, FORMAT, codec.number, block, len(array)), *parts])


def decode(payload: bytes | memoryview) -> Tensor:
    """What ``encode`` wrote, as a fp32 tensor of one dimension on the CPU.

    Raises:
        ExchangeError: not a payload of this format, cut short, or with values that are not finite.
    """
    view = memoryview(payload)
    if len(view) < _HEADER.size:
        raise ExchangeError(f"not a coded payload: {len(view)} bytes")
    magic, version, number, block, count = _HEADER.unpack(view[: _HEADER.size])
    codec = _BY_NUMBER.get(number)
    if magic != MAGIC or version != FORMAT or codec is None:
        raise ExchangeError("not a coded payload of this format (wrong magic, version or codec number)")
    try:
        values = codec.read(view[_HEADER.size :], count, block)
    except ValueError as error:
        raise ExchangeError(f"damaged {codec.name} payload: {error}") from error
    if not np.isfinite(values).all():
        raise ExchangeError(f"damaged {codec.name} payload: a value is not finite")
    return torch.from_numpy(values)


def _widen(halves: npt.NDArray[np.generic]) -> Floats:
    """bf16 bits to fp32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _uniform(count: int, key: Key) -> Floats:
    """``count`` values (k + ½)/2¹⁶. 17 fractional bits and 7 bits of |q| fit fp32's 24, so x/s + u is exact when x
    lies on the grid: such values are never moved. The half centres the distribution, so rounding stays unbiased."""
    generator = np.random.Philox(
        key=np.array([key.seed, key.cell], dtype=np.uint64),
        counter=np.array([0, key.chunk, key.window, key.fragment], dtype=np.uint64),
    )
    raw = generator.random_raw(-(-count // 4)).astype("<u8", copy=False)
    uniform = raw.view("<u2")[:count].astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2**-16)
    return uniform
