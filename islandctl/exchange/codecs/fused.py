"""int4 on an accelerator: one Triton kernel that encodes and one that decodes.

Decoding gives the CPU's bits. Encoding takes its random bits from Triton's own Philox, so that it is reproducible on
one kind of device, not between a device and a CPU; scales, grid and layout are those of ``grid``. Triton is imported
when the first tensor on an accelerator comes.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from islandctl.exchange.codecs.bits import Key
from islandctl.ledger.packet import digest


def encode_body(values: Tensor, block: int, key: Key, *, stochastic: bool) -> Tensor:
    """The body of an int4 payload, uint8, on the device of ``values``.

    Args:
        values: finite, fp32, one dimension.
        block: values per scale; even.
        key: what the random bits depend on.
        stochastic: or to nearest.
    """
    count = len(values)
    num_blocks = -(-count // block)
    body = torch.empty(2 * num_blocks + -(-count // 2), dtype=torch.uint8, device=values.device)
    words = struct.pack("<5Q", key.seed, key.cell, key.fragment, key.window, key.chunk)
    seed = int(digest(words)[:15], 16)
    if count:
        half = triton.next_power_of_2(block // 2)
        scales, codes = body[: 2 * num_blocks].view(torch.int16), body[2 * num_blocks :]
        _encode[(num_blocks,)](values, scales, codes, count, seed, block, half, stochastic)
    return body


def decode_body(body: Tensor, block: int, out: Tensor) -> None:
    """Fill ``out`` from a body on the same device; ``block`` even."""
    count = len(out)
    num_blocks = -(-count // block)
    if count:
        half = triton.next_power_of_2(block // 2)
        _decode[(num_blocks,)](
            body[: 2 * num_blocks].view(torch.int16), body[2 * num_blocks :], out, count, block, half
        )


@triton.jit
def _encode(
    values: Any,
    scales: Any,
    codes: Any,
    count: Any,
    seed: Any,
    block: tl.constexpr,
    half: tl.constexpr,
    stochastic: tl.constexpr,
) -> None:
    """One block of values: the even ones go to the lower halves of its bytes, the odd ones to the upper halves."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, half)
    even = number * block + 2 * lane
    inside = lane < block // 2
    has_even, has_odd = inside & (even < count), inside & (even + 1 < count)
    low = tl.load(values + even, mask=has_even, other=0.0)
    high = tl.load(values + even + 1, mask=has_odd, other=0.0)
    low = tl.minimum(tl.maximum(low, -1.7014118346046923e38), 1.7014118346046923e38)  # ±2^127, as on the CPU
    high = tl.minimum(tl.maximum(high, -1.7014118346046923e38), 1.7014118346046923e38)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
    bits = tl.div_rn(largest, 7.0).to(tl.int32, bitcast=True)
    bits = ((bits + 0xFFFF) >> 16) << 16
    short = bits.to(tl.float32, bitcast=True) * 7.0 < largest
    bits = tl.where(short, bits + 0x10000, bits)
    tl.store(scales + number, (bits >> 16).to(tl.int16))
    scale = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
    # q + 8 over 16 bits of fraction; what is added to the fraction carries as often as the fraction says.
    low_fixed = (tl.div_rn(low, scale + tl.zeros_like(low)) + 136.0).to(tl.int32, bitcast=True)
    high_fixed = (tl.div_rn(high, scale + tl.zeros_like(high)) + 136.0).to(tl.int32, bitcast=True)
    if stochastic:
        noise = tl.randint(seed, number * (block // 2) + lane).to(tl.uint32, bitcast=True)
        low_fixed += (noise & 0xFFFF).to(tl.int32)
        high_fixed += (noise >> 16).to(tl.int32)
    else:
        low_fixed += 0x8000
        high_fixed += 0x8000
    low_code = tl.where(has_even, (low_fixed >> 16) & 0xF, 0)
    high_code = tl.where(has_odd, (high_fixed >> 16) & 0xF, 0)
    place = number * (block // 2) + lane
    tl.store(codes + place, (low_code | (high_code << 4)).to(tl.uint8), mask=has_even)


@triton.jit
def _decode(scales: Any, codes: Any, out: Any, count: Any, block: tl.constexpr, half: tl.constexpr) -> None:
    """One block: every byte gives two values."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, half)
    even = number * block + 2 * lane
    inside = lane < block // 2
    has_even, has_odd = inside & (even < count), inside & (even + 1 < count)
    octets = tl.load(codes + number * (block // 2) + lane, mask=has_even, other=0).to(tl.int32)
    scale = (tl.load(scales + number).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(out + even, ((octets & 0xF) - 8).to(tl.float32) * scale, mask=has_even)
    tl.store(out + even + 1, ((octets >> 4) - 8).to(tl.float32) * scale, mask=has_odd)
