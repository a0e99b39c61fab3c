"""The border between the exchange and whatever carries packets: the relay, or a dictionary in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from islandctl.ledger.entries import Entry


class Transport(Protocol):
    """What the exchange needs of a relay. Every call blocks; the exchange makes them beside the training loop.

    All methods raise ``UnreachableError`` when there is no answer (try again), and ``RelayError`` with a code
    when the relay refuses (do not try again).
    """

    def put(self, packet: bytes) -> None:
        """Store one packet, once. The same bytes again are welcome.

        Raises:
            RelayError: code ``exists`` (other bytes are stored for this round already), ``closed`` (the round is
                committed without it), ``stale`` (old anchor version or attempt), ``halted``.
        """

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        """The packet's bytes. Given out after the round's commit, or to the cell that put it."""

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        """Ledger entries with seq > ``after`` in order; waits up to ``wait_s`` seconds for the first of them."""
