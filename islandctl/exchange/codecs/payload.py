"""Whole payloads: header and body, encoded and decoded tile by tile."""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import torch
from torch import Tensor

from islandctl.config.codec import body_bytes
from islandctl.errors import ExchangeError
from islandctl.exchange.codecs.base import BadValueError, Codec, Floats, Octets, Writer
from islandctl.exchange.codecs.bits import Key
from islandctl.exchange.codecs.grid import Grid
from islandctl.exchange.codecs.registry import codec_numbered

MAGIC = b"ISLC"
FORMAT = 2
_HEADER = struct.Struct("<4sBBHQ")


def encode(codec: Codec, values: Tensor, key: Key) -> bytes:
    """The bytes of ``values``.

    Args:
        codec: how to write them.
        values: fp32, one dimension. On an accelerator int4 is encoded there, with random bits of its own.
        key: what the random bits depend on.

    Raises:
        ExchangeError: a value is not finite.
    """
    if values.is_cuda and _is_fused(codec):
        return _encode_there(codec, values, key)
    array = _floats(values)
    buffer, write = _begin(codec, len(array), key)
    try:
        for start in range(0, len(array), codec.tile):
            write(start, array[start : start + codec.tile])
    except BadValueError as error:
        raise _refusal(key) from error
    del write  # while it can still write, the buffer would give out a copy
    return buffer.getvalue()


def decode(payload: bytes | memoryview, out: Tensor | None = None) -> Tensor:
    """What ``encode`` wrote, as a fp32 tensor of one dimension, on the CPU unless ``out`` is elsewhere.

    Args:
        payload: header and body.
        out: takes the values, if given; fp32, of their number.

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
        out = torch.from_numpy(np.empty(count, dtype=np.float32))
    elif len(out) != count:
        raise ExchangeError(f"{count} values do not fit a room for {len(out)}")
    room = torch.empty(count, dtype=torch.float32) if out.is_cuda and not _is_fused(codec) else out
    try:
        if room.is_cuda:
            _decode_there(codec, body, room)
        else:
            codec.read(body, room.numpy())
    except BadValueError as error:
        raise ExchangeError(f"damaged {codec.name} payload: {error}") from error
    return out if room is out else out.copy_(room)


def _begin(codec: Codec, count: int, key: Key) -> tuple[BytesIO, Writer]:
    """A payload with its header, and the writer of its body. The buffer gives its bytes away uncopied."""
    header = _HEADER.pack(MAGIC, FORMAT, codec.number, codec.block, count)
    buffer = BytesIO(bytes(len(header) + body_bytes(codec.name, codec.block, count)))
    room = np.frombuffer(buffer.getbuffer(), dtype=np.uint8)
    room[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return buffer, codec.writer(count, room[len(header) :], key)


def _is_fused(codec: Codec) -> bool:
    """Whether an accelerator has a kernel for it."""
    return codec.name == "int4" and codec.block % 2 == 0


def _encode_there(codec: Codec, values: Tensor, key: Key) -> bytes:
    from islandctl.exchange.codecs.fused import encode_body  # Triton is only where an accelerator is

    if not torch.isfinite(values).all():
        raise _refusal(key)
    values = values.detach().contiguous()
    body = encode_body(values, codec.block, key, stochastic=isinstance(codec, Grid) and codec.stochastic)
    header = _HEADER.pack(MAGIC, FORMAT, codec.number, codec.block, len(values))
    return header + body.cpu().numpy().tobytes()


def _decode_there(codec: Codec, body: Octets, out: Tensor) -> None:
    from islandctl.exchange.codecs.fused import decode_body

    decode_body(torch.from_numpy(body.copy()).to(out.device), codec.block, out)
    if not torch.isfinite(out).all():
        raise BadValueError("a scale is not finite")


def _floats(values: Tensor) -> Floats:
    return np.ascontiguousarray(values.detach().cpu().numpy(), dtype=np.float32)


def _refusal(key: Key) -> ExchangeError:
    return ExchangeError(
        f"cell {key.cell}, fragment {key.fragment}, window {key.window}, chunk {key.chunk}: "
        "a value is not finite; nothing was encoded"
    )
