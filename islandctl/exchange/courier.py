"""Carries packets beside the training loop: encode and put one's own, fetch and check what a commit names."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from islandctl.errors import DivergenceError, ExchangeError, RelayError, UnreachableError
from islandctl.exchange.codecs import Codec, Key, decode, encode
from islandctl.exchange.follower import PATIENCE_S, Latch
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.hints import NO_LONGER_EQUAL
from islandctl.exchange.transport import Transport
from islandctl.ledger.entries import Commit, Contribution
from islandctl.ledger.packet import PacketHeader, digest, pack, unpack

log = logging.getLogger(__name__)

ANSWERED_BY_COMMIT = ("exists", "closed", "stale")
"""Refusals after which the round's commit tells what counts: another life's packet, or none."""
NEVER_EQUAL = "all cells must begin with equal values: one seed before the model is made, or one file of weights"


@dataclass(frozen=True)
class Identity:
    """What every packet of this cell says of itself."""

    run: str
    config_hash: str
    attempt: int
    cell: int
    seed: int


@dataclass(frozen=True)
class Assignment:
    """One chunk of one round: what its packet is to say."""

    chunk: Chunk
    num_chunks: int
    window: int
    version: int
    base: str
    step: int
    tokens: int


class Courier:
    """Threads that encode and move packets. Nothing here touches the model.

    Encoding has a thread of its own, so that a checkpoint never waits for the network.
    """

    def __init__(self, transport: Transport, identity: Identity, latch: Latch, *, streams: int = 4) -> None:
        self._transport = transport
        self._identity = identity
        self._latch = latch
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="exchange-encode")
        self._sender = ThreadPoolExecutor(streams, thread_name_prefix="exchange-put")
        self.fetcher = ThreadPoolExecutor(streams, thread_name_prefix="exchange-fetch")
        self._own: dict[tuple[int, int, int], bytes] = {}  # (fragment, window, chunk) → packet, until resolved
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, assignment: Assignment, vector: Tensor, codec: Codec) -> Future[bytes]:
        """Encode ``vector`` and put it; the future is the payload, done once it is encoded."""
        return self._encoder.submit(self._encode, assignment, vector, codec)

    def resend(self, assignment: Assignment, payload: bytes, codec: Codec) -> None:
        """Put a payload from a checkpoint again."""
        self._sender.submit(self._put, assignment, payload, codec)

    def forget(self, fragment: int, window: int) -> None:
        """The fragment's rounds up to ``window`` are resolved: their own packets are not needed any more."""
        for place in list(self._own):
            if place[0] == fragment and place[1] <= window:
                self._own.pop(place, None)

    def close(self) -> None:
        """End the threads; the latch must be closed before."""
        for pool in (self._encoder, self._sender, self.fetcher):
            pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, assignment: Assignment, vector: Tensor, codec: Codec) -> bytes:
        key = Key(
            self._identity.seed,
            self._identity.cell,
            assignment.chunk.fragment,
            assignment.window,
            assignment.chunk.index,
        )
        try:
            payload = encode(codec, vector, key)
        except Exception as error:
            self._latch.fail(error)
            raise
        if not self._latch.closed.is_set():
            self._sender.submit(self._put, assignment, payload, codec)
        return payload

    def _put(self, assignment: Assignment, payload: bytes, codec: Codec) -> None:
        try:
            self._carry(self._packet(assignment, payload, codec), assignment)
        except Exception as error:  # in a pool nobody else would hear of it, and the round would stay open
            self._latch.fail(error)

    def _packet(self, assignment: Assignment, payload: bytes, codec: Codec) -> bytes:
        chunk, me = assignment.chunk, self._identity
        header = PacketHeader(
            run=me.run,
            config_hash=me.config_hash,
            attempt=me.attempt,
            cell=me.cell,
            fragment=chunk.fragment,
            window=assignment.window,
            chunk=chunk.index,
            num_chunks=assignment.num_chunks,
            version=assignment.version,
            base=assignment.base,
            step=assignment.step,
            tokens=assignment.tokens,
            codec=codec.name,
            payload_hash=digest(payload),
            payload_bytes=len(payload),
        )
        return pack(header, payload)

    def _carry(self, packet: bytes, assignment: Assignment) -> None:
        chunk, me = assignment.chunk, self._identity
        self._own[(chunk.fragment, assignment.window, chunk.index)] = packet
        while not self._latch.closed.is_set():
            try:
                self._transport.put(packet)
                self.bytes_up += len(packet)
                return
            except UnreachableError:
                self._latch.pause(PATIENCE_S)
            except RelayError as error:
                if error.code not in ANSWERED_BY_COMMIT:
                    place = _place(me.cell, chunk.fragment, assignment.window, chunk.index)
                    kind = DivergenceError if error.code == "diverged" else ExchangeError
                    refused = kind(f"{place}: refused by the relay ({error.code}): {error.message}")
                    refused.__cause__ = error
                    self._latch.fail(refused)
                    return
                log.info("packet of fragment %d, window %d: %s", chunk.fragment, assignment.window, error.code)
                return

    def fetch(self, commit: Commit, part: Contribution, chunk: Chunk, base: str) -> Tensor:
        """The decoded packet of one cell that ``commit`` names; fp32, the chunk's length.

        Args:
            base: hash of the anchor and outer state that this cell holds for the chunk.

        Raises:
            DivergenceError: the packet builds on another anchor than this cell's.
            ExchangeError: the packet is not the one that the commit names, or damaged.
        """
        place = _place(part.cell, commit.fragment, commit.window, chunk.index)
        named = part.chunks[chunk.index] if chunk.index < len(part.chunks) else ""
        own = self._own.get((commit.fragment, commit.window, chunk.index), b"")
        # Another packet of this cell can be stored, put in an earlier life: then that is what was sent.
        is_own = part.cell == self._identity.cell and digest(own) == named
        packet = own if is_own else self._download(commit, part.cell, chunk, place)
        if digest(packet) != named:
            raise ExchangeError(f"{place}: the packet's bytes are not those that the commit names")
        header, payload = unpack(packet)
        told = (header.run, header.config_hash, header.attempt, header.cell, header.fragment, header.window)
        me = self._identity
        expected = (me.run, me.config_hash, me.attempt, part.cell, commit.fragment, commit.window)
        if told != expected or header.chunk != chunk.index:
            raise ExchangeError(f"{place}: the packet's header belongs to another place")
        if header.base != base or header.version != commit.version - 1:
            raise DivergenceError(
                f"{place}: builds on anchor {header.base[:12]} (version {header.version}), "
                f"cell {me.cell} holds {base[:12]} (version {commit.version - 1})",
                hint=NO_LONGER_EQUAL if header.version else NEVER_EQUAL,
            )
        try:
            values = decode(payload)
        except ExchangeError as error:
            raise ExchangeError(f"{place}: {error}") from error
        if len(values) != chunk.numel:
            raise ExchangeError(f"{place}: {len(values)} values for a chunk of {chunk.numel}")
        return values

    def _download(self, commit: Commit, cell: int, chunk: Chunk, place: str) -> bytes:
        while True:
            try:
                packet = self._transport.fetch(commit.attempt, commit.fragment, commit.window, cell, chunk.index)
                self.bytes_down += len(packet)
                return packet
            except UnreachableError:
                if self._latch.pause(PATIENCE_S):
                    raise
            except RelayError as error:
                raise ExchangeError(f"{place}: named by a commit, but refused ({error.code})") from error


def _place(cell: int, fragment: int, window: int, chunk: int) -> str:
    return f"cell {cell}, fragment {fragment}, window {window}, chunk {chunk}"
