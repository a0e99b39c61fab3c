"""A packet: one chunk of one cell's encoded contribution to one round.

On the wire and on disk, all integers little-endian::

    b"ISLP"   magic
    u16       format version (1)
    u32       header length in bytes
    header    canonical JSON, UTF-8
    payload   what the codec wrote (opaque here)

The header's JSON is canonical (sorted keys, no blanks), so equal packets have equal bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from blake3 import blake3
from pydantic import Field, ValidationError

from islandctl.config.model import Model
from islandctl.errors import ExchangeError

MAGIC = b"ISLP"
FORMAT = 1
MAX_HEADER_BYTES = 64 * 1024
_PREFIX = struct.Struct("<4sHI")


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no blanks: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(content: bytes | bytearray | memoryview) -> str:
    """The blake3 hash of ``content``, as 64 hexadecimal digits."""
    return blake3(content).hexdigest()


class PacketHeader(Model):
    """What a packet says of itself."""

    run: str
    config_hash: str
    attempt: int = Field(ge=1)
    cell: int = Field(ge=0)
    fragment: int = Field(ge=0)
    window: int = Field(ge=0)
    chunk: int = Field(ge=0)
    """Index inside the fragment."""
    num_chunks: int = Field(ge=1)
    """Chunks of the fragment."""
    version: int = Field(ge=0)
    """Commits that the anchor it builds on contains."""
    base: str
    """Hash of the chunk's anchor and outer state that it builds on."""
    step: int = Field(ge=0)
    """The cell's step counter at the snapshot. Cells whose counters have drifted apart align them by it."""
    tokens: int = Field(ge=0)
    """Tokens trained since the cell's last packet of this fragment that a commit named."""
    codec: str
    payload_hash: str
    payload_bytes: int = Field(ge=0)


def pack(header: PacketHeader, payload: bytes) -> bytes:
    """Join header and payload to a packet's bytes."""
    head = canonical_json(header.model_dump())
    return _PREFIX.pack(MAGIC, FORMAT, len(head)) + head + payload


def read_header(start: bytes | bytearray | memoryview) -> tuple[PacketHeader, int] | None:
    """Read the header from a packet's first bytes.

    Returns:
        (header, offset of the payload), or None when more bytes are needed.

    Raises:
        ExchangeError: these bytes cannot begin a packet.
    """
    if len(start) < _PREFIX.size:
        return None
    magic, version, length = _PREFIX.unpack(start[: _PREFIX.size])
    if magic != MAGIC or version != FORMAT or length > MAX_HEADER_BYTES:
        raise ExchangeError("not a packet of this format (wrong magic, version or header length)")
    end = _PREFIX.size + length
    if len(start) < end:
        return None
    try:
        return PacketHeader.model_validate_json(bytes(start[_PREFIX.size : end])), end
    except ValidationError as error:
        wrong = [str(fault["loc"][0]) if fault["loc"] else "no JSON" for fault in error.errors(include_url=False)]
        raise ExchangeError(f"damaged packet header: {', '.join(dict.fromkeys(wrong))}") from error


def unpack(packet: bytes | memoryview) -> tuple[PacketHeader, memoryview]:
    """Split a packet and check its payload against the header's hash and length.

    Raises:
        ExchangeError: not a packet, cut short, or damaged.
    """
    view = memoryview(packet)
    found = read_header(view)
    if found is None:
        raise ExchangeError(f"not a packet, or cut short: {len(view)} bytes")
    header, offset = found
    payload = view[offset:]
    if len(payload) != header.payload_bytes or digest(payload) != header.payload_hash:
        raise ExchangeError(
            f"damaged packet: cell {header.cell}, fragment {header.fragment}, window {header.window}, "
            f"chunk {header.chunk}: payload does not match its hash"
        )
    return header, payload
