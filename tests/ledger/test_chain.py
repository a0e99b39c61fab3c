"""Nothing in the ledger can be changed, left out, moved or put in without being found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.errors import LedgerError
from islandctl.ledger.chain import START, seal, verify
from islandctl.ledger.entries import ENTRY, Commit, Entry

from .builders import Book


def ledger() -> list[Entry]:
    book = Book()
    book.joint(10, 20)
    book.stop()
    book.rewind(10)
    return book.entries


def test_a_whole_ledger_verifies_also_after_a_round_trip_through_json() -> None:
    entries = ledger()
    read = [ENTRY.validate_json(entry.model_dump_json()) for entry in entries]
    assert verify(read) == entries[-1].hash
    assert verify([]) == START


@given(st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_change_is_found(data: st.DataObject) -> None:
    entries = ledger()
    at = data.draw(st.integers(0, len(entries) - 1))
    change = data.draw(st.sampled_from(["time", "drop", "swap", "double", "reseal"]))
    if change == "time":
        entries[at] = entries[at].model_copy(update={"at": "1999"})
    elif change == "drop" and at < len(entries) - 1:
        del entries[at]
    elif change == "swap" and at < len(entries) - 1:
        entries[at], entries[at + 1] = entries[at + 1], entries[at]
    elif change == "reseal" and at < len(entries) - 1:
        entries[at] = seal(entries[at].model_copy(update={"at": "1999"}), entries[at].previous)
    else:
        entries.insert(at, entries[at])
    with pytest.raises(LedgerError, match=r"ledger entry \d+"):
        verify(entries)


def test_the_message_names_entry_and_reason() -> None:
    entries = ledger()
    entries[3] = entries[3].model_copy(update={"step": 99})
    with pytest.raises(LedgerError, match=r"entry 3 \(checkpoint\) was changed: its hash"):
        verify(entries)
    with pytest.raises(LedgerError, match="entry 0 is missing: entry 1 stands"):
        verify(ledger()[1:])


def test_a_second_genesis_is_found() -> None:
    entries = ledger()[:1]
    entries.append(seal(entries[0].model_copy(update={"seq": 1}), entries[0].hash))
    with pytest.raises(LedgerError, match="genesis stands first"):
        verify(entries)


def test_a_commit_without_a_pair_is_written_as_before_there_were_any() -> None:
    place = {"seq": 3, "attempt": 1, "at": "", "fragment": 0, "window": 2, "version": 1, "named": ()}
    plain = Commit.model_validate(place | {"previous": START, "reason": "deadline"})
    of_pair = Commit.model_validate(place | {"previous": START, "reason": "deadline", "pair": (0, 2)})
    assert "pair" not in plain.model_dump_json()
    known = "c06c5764df73533794775aa60f57c006a0a4c51eaae4bb174545a2d45efca481"
    assert seal(plain, START).hash == known
    assert seal(of_pair, START).hash != known
    assert ENTRY.validate_json(of_pair.model_dump_json()) == of_pair
    assert (plain.concerns(1), of_pair.concerns(1), of_pair.concerns(2)) == (True, False, True)
