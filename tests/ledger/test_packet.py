"""A packet's bytes: what is cut, damaged or no packet at all is told, never taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.errors import ExchangeError
from islandctl.ledger.packet import PacketHeader, digest, pack, read_header, unpack

HEADER = PacketHeader(
    run="tale",
    config_hash="c",
    attempt=1,
    cell=0,
    fragment=0,
    window=3,
    chunk=0,
    num_chunks=1,
    version=2,
    base="b",
    step=9,
    tokens=5,
    codec="int8",
    payload_hash=digest(b"payload"),
    payload_bytes=7,
)
PACKET = pack(HEADER, b"payload")


def test_round_trip() -> None:
    header, payload = unpack(PACKET)
    assert (header, bytes(payload)) == (HEADER, b"payload")


def test_every_cut_is_told() -> None:
    for length in range(len(PACKET)):
        with pytest.raises(ExchangeError):
            unpack(PACKET[:length])


def test_a_header_is_read_as_soon_as_it_is_there() -> None:
    for length in range(len(PACKET)):
        found = read_header(PACKET[:length])
        assert found == (None if length < len(PACKET) - 7 else (HEADER, len(PACKET) - 7))


@given(st.integers(0, 8 * len(PACKET) - 1))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_flipped_bit_is_told_or_changes_the_whole_hash(bit: int) -> None:
    damaged = bytearray(PACKET)
    damaged[bit // 8] ^= 1 << bit % 8
    assert digest(damaged) != digest(PACKET)
    if bit // 8 >= len(PACKET) - 7:
        with pytest.raises(ExchangeError, match="damaged"):
            unpack(bytes(damaged))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [(b'"tokens":5', b'"tokens":-5', "tokens"), (b'"cell":0', b'"more":0', "cell, more"), (b'{"', b'"{', "no JSON")],
)
def test_what_is_wrong_in_a_header_is_named(old: bytes, new: bytes, told: str) -> None:
    header = PACKET[10 : -len(b"payload")].replace(old, new, 1)
    with pytest.raises(ExchangeError) as caught:
        unpack(PACKET[:6] + struct.pack("<I", len(header)) + header + b"payload")
    assert caught.value.message == f"damaged packet header: {told}"


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_bytes_are_no_packet(content: bytes) -> None:
    with pytest.raises(ExchangeError):
        unpack(content)
