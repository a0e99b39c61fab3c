"""The hash chain: every entry holds the hash of the one before, so nothing can be changed or left out in silence."""

from __future__ import annotations

from collections.abc import Iterable

from islandctl.errors import LedgerError
from islandctl.ledger.entries import Entry
from islandctl.ledger.packet import canonical_json, digest

START = "0" * 64
"""What the first entry holds as ``previous``."""


def entry_hash(entry: Entry) -> str:
    """The blake3 hash of the entry's canonical JSON, ``hash`` itself left out: 64 hexadecimal digits."""
    return digest(canonical_json(entry.model_dump(mode="json", exclude={"hash"})))


def seal(entry: Entry, previous_hash: str) -> Entry:
    """The same entry, chained to the one whose hash is ``previous_hash``."""
    linked = entry.model_copy(update={"previous": previous_hash})
    return linked.model_copy(update={"hash": entry_hash(linked)})


def check_link(entry: Entry, seq: int, previous_hash: str) -> None:
    """Check that ``entry`` is number ``seq``, follows ``previous_hash`` and is unchanged.

    Raises:
        LedgerError: naming the entry and what is wrong with it.
    """
    if entry.seq != seq:
        raise LedgerError(f"ledger entry {seq} is missing: entry {entry.seq} stands in its place")
    if entry.previous != previous_hash:
        raise LedgerError(f"ledger entry {seq} ({entry.kind}) does not follow the entry before it")
    if entry.hash != entry_hash(entry):
        raise LedgerError(f"ledger entry {seq} ({entry.kind}) was changed: its hash does not match its content")
    if (entry.kind == "genesis") != (seq == 0):
        raise LedgerError(f"ledger entry {seq} is of kind {entry.kind}; genesis stands first, and only there")


def verify(entries: Iterable[Entry]) -> str:
    """Check a whole ledger from its first entry on.

    Returns:
        The hash of the last entry, ``START`` when there is none.

    Raises:
        LedgerError: naming the first entry that breaks the chain, and why.
    """
    head = START
    for seq, entry in enumerate(entries):
        check_link(entry, seq, head)
        head = entry.hash
    return head
