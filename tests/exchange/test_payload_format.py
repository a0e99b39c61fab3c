"""The format of payloads as docs/architecture.md tells it, by a reader and writer made from that alone."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from islandctl.exchange.codecs import Key, decode, encode
from islandctl.exchange.codecs.registry import codec_named

KEY = Key(seed=11, cell=2, fragment=3, window=70, chunk=1)
VALUES = np.random.default_rng(5).normal(size=531).astype(np.float32) * np.geomspace(1e-9, 10, 531, dtype=np.float32)
VALUES[200:300] = 0


def bf16(bits: int) -> np.float32:
    return np.frombuffer(struct.pack("<HH", 0, bits), "<f4")[0]


def read(payload: bytes) -> list[np.float32]:
    magic, version, codec, block, count = struct.unpack("<4sBBHQ", payload[:16])
    assert (magic, version) == (b"ISLC", 2)
    if codec == 1:
        return list(np.frombuffer(payload[16:], "<f4"))
    num_scales = -(-count // block) if block else count
    scales = [bf16(bits) for bits in struct.unpack(f"<{num_scales}H", payload[16 : 16 + 2 * num_scales])]
    codes = payload[16 + 2 * num_scales :]
    bits = {2: 0, 3: 8, 4: 4, 5: 2}[codec]
    if not bits:
        return scales
    each = [byte >> shift & (1 << bits) - 1 for byte in codes for shift in range(0, 8, bits)][:count]
    steps = {3: lambda code: code - 128, 4: lambda code: code - 8, 5: lambda code: 2 * code - 3}[codec]
    return [np.float32(steps(code)) * scales[at // block] for at, code in enumerate(each)]


def write(codec: str, block: int, *, nearest: bool) -> bytes:
    number, levels, fraction = {"int8": (3, 127, 15), "int4": (4, 7, 16)}[codec]
    counter = struct.pack(">4I", KEY.fragment, KEY.window, KEY.chunk, 0)
    cipher = Cipher(algorithms.AES(struct.pack("<2Q", KEY.seed, KEY.cell)), modes.CTR(counter)).encryptor()
    stream = struct.unpack(f"<{len(VALUES)}H", cipher.update(bytes(2 * len(VALUES))))
    scales, codes = [], []
    for start in range(0, len(VALUES), block):
        part = VALUES[start : start + block]
        largest = np.abs(part).max()
        bits = next(bits for bits in range(2**15) if bf16(bits) * np.float32(levels) >= largest)
        scales.append(bits)
        for at, value in enumerate(part, start):
            fixed = round(float(value / max(bf16(bits), np.float32(2.0**-133))) * 2**fraction)
            chance = 1 << fraction - 1 if nearest else stream[at] >> 16 - fraction
            codes.append((fixed + chance >> fraction) + levels + 1)
    if codec == "int4":
        codes = [low | high << 4 for low, high in zip(codes[::2], [*codes[1::2], 0], strict=False)]
    head = struct.pack("<4sBBHQ", b"ISLC", 2, number, block, len(VALUES))
    return head + struct.pack(f"<{len(scales)}H", *scales) + bytes(codes)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "2bit"])
def test_payloads_read_as_documented(codec: str) -> None:
    payload = encode(codec_named(codec), torch.from_numpy(VALUES), KEY)
    assert np.array_equal(np.array(read(payload)), decode(payload).numpy())


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("codec", "block"), [("int8", 256), ("int4", 128), ("int4", 51)])
def test_payloads_are_written_as_documented(codec: str, block: int, rounding: str) -> None:
    made = encode(codec_named(codec, block=block, rounding=rounding), torch.from_numpy(VALUES), KEY)  # type: ignore[arg-type]
    assert made == write(codec, block, nearest=rounding == "nearest")
