"""Whole payloads: header and body, encoded and decoded tile by tile."""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import torch
from torch import Tensor

from islandctl.config.codec import body_bytes
from islandctl.errors import ExchangeError
from islandctl.exchange.codecs.base import Codec, Floats, NotFiniteError, Writer
from islandctl.exchange.codecs.bits import Key
from islandctl.exchange.codecs.registry import codec_numbered

MAGIC = b"ISLC"
FORMAT = 2
_HEADER = struct.Struct("<4sBBHQ")


def encode(codec: Codec, values: Tensor, key: Key) -> bytes:
    """The bytes of ``values``.

    Args:
        codec: how to write them.
        values: fp32, one dimension, on the CPU.
        key: what the random bits depend on.

    Raises:
        ExchangeError: a value is not finite.
    """
    array = _floats(values)
    buffer, write = _begin(codec, len(array), key)
    try:
        for start in range(0, len(array), codec.tile):
            write(start, array[start : start + codec.tile], None)
    except NotFiniteError as error:
        raise _refusal(key) from error
    return buffer.getvalue()


def encode_with_feedback(
    codec: Codec, delta: Tensor, residual: Tensor, beta: float, key: Key, *, decoded: Tensor | None = None
) -> tuple[bytes, Tensor]:
    """Encode v = delta + β·residual and give what is left, walking the values once.

    Args:
        codec: how to write them.
        delta: the pseudo-gradient, fp32, one dimension, on the CPU.
        residual: what earlier packets have left out, of the same length.
        beta: β, the share of the residual that is sent.
        key: what the random bits depend on.
        decoded: takes what a reader of the payload will find; may be ``delta`` itself.

    Returns:
        The payload, and the new residual v − decoded.

    Raises:
        ExchangeError: a value is not finite; ``residual`` is as it was.
    """
    d, e = _floats(delta), _floats(residual)
    buffer, write = _begin(codec, len(d), key)
    left = torch.empty(len(d), dtype=torch.float32)
    left_array: Floats = left.numpy()
    told: Floats | None = None if decoded is None else decoded.numpy()
    vector, room = (np.empty(min(codec.tile, len(d)), dtype=np.float32) for _ in range(2))
    share = np.float32(beta)
    try:
        for start in range(0, len(d), codec.tile):
            tile = slice(start, start + codec.tile)
            v = vector[: len(d[tile])]
            if beta == 1:
                np.add(d[tile], e[tile], out=v)
            else:
                np.multiply(e[tile], share, out=v)
                np.add(d[tile], v, out=v)
            found = room[: len(v)] if told is None else told[tile]
            write(start, v, found)
            np.subtract(v, found, out=left_array[tile])
    except NotFiniteError as error:
        raise _refusal(key) from error
    return buffer.getvalue(), left


def decode(payload: bytes | memoryview, out: Tensor | None = None) -> Tensor:
    """What ``encode`` wrote, as a fp32 tensor of one dimension on the CPU.

    Args:
        payload: header and body.
        out: takes the values, if given; fp32, of their number, on the CPU.

    Raises:
        ExchangeError: not a payload of this format, cut short, or with values that are not finite.
    """
    view = memoryview(payload)
    if len(view) < _HEADER.size:
        raise ExchangeError(f"not a coded payload: {len(view)} bytes")
    magic, version, number, block, count = _HEADER.unpack(view[: _HEADER.size])
    if magic != MAGIC or version != FORMAT:
        raise ExchangeError("not a coded payload of this format (wrong magic or version)")
    try:
        codec = codec_numbered(number, block)
    except ValueError as error:
        raise ExchangeError(f"not a coded payload of this format: {error}") from error
    body = np.frombuffer(view[_HEADER.size :], dtype=np.uint8)
    if len(body) != body_bytes(codec.name, block, count):
        raise ExchangeError(f"damaged {codec.name} payload: {len(body)} bytes for {count} values")
    if out is None:
        out = torch.empty(count, dtype=torch.float32)
    elif len(out) != count:
        raise ExchangeError(f"{count} values do not fit a room for {len(out)}")
    try:
        codec.read(body, out.numpy())
    except NotFiniteError as error:
        raise ExchangeError(f"damaged {codec.name} payload: {error}") from error
    return out


def _begin(codec: Codec, count: int, key: Key) -> tuple[BytesIO, Writer]:
    """A payload with its header, and the writer of its body. The buffer gives its bytes away without a copy."""
    header = _HEADER.pack(MAGIC, FORMAT, codec.number, codec.block, count)
    buffer = BytesIO(bytes(len(header) + body_bytes(codec.name, codec.block, count)))
    room = np.frombuffer(buffer.getbuffer(), dtype=np.uint8)
    room[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return buffer, codec.writer(count, room[len(header) :], key)


def _floats(values: Tensor) -> Floats:
    return np.ascontiguousarray(values.detach().numpy(), dtype=np.float32)


def _refusal(key: Key) -> ExchangeError:
    return ExchangeError(
        f"cell {key.cell}, fragment {key.fragment}, window {key.window}, chunk {key.chunk}: "
        "a value is not finite; nothing was encoded"
    )
