"""Packets for the relay's tests."""

from __future__ import annotations

from islandctl.ledger.packet import PacketHeader, digest, pack

RUN = "tale"
CONFIG = "c" * 64
CELLS = ("usa", "asia")


def packet(
    cell: int = 0,
    fragment: int = 0,
    window: int = 0,
    chunk: int = 0,
    *,
    attempt: int = 1,
    version: int = 0,
    num_chunks: int = 1,
    base: str | None = None,
    tokens: int = 100,
    payload: bytes | None = None,
    **changes: object,
) -> bytes:
    """One chunk's packet. Its payload depends on its place, as a worker's does; ``changes`` overrides the header."""
    content = payload if payload is not None else f"{attempt} {cell} {fragment} {window} {chunk} {version}".encode()
    header = {
        "run": RUN,
        "config_hash": CONFIG,
        "attempt": attempt,
        "cell": cell,
        "fragment": fragment,
        "window": window,
        "chunk": chunk,
        "num_chunks": num_chunks,
        "version": version,
        "base": base if base is not None else digest(f"base {fragment} {chunk} {version}".encode()),
        "step": 50 * (window + 1),
        "tokens": tokens,
        "codec": "int8",
        "payload_hash": digest(content),
        "payload_bytes": len(content),
    }
    return pack(PacketHeader.model_validate(header | changes), content)
