"""Growing files to one stream of whole lines: nothing lost, nothing doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.errors import UsageError
from islandctl.runs.merge import Line, Tail, last, line_time, merge, since_time


def tail(source: str = "east/rank-0") -> Tail:
    return Tail(source, "east", 0)


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


@given(
    st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), max_size=8),
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 40)), max_size=20),
)
def test_any_reads_with_repeats_give_each_line_once(lines: list[bytes], reads: list[tuple[int, int]]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    one = tail()
    seen: list[str] = []
    for back, length in reads:
        start = max(0, one.offset - back)  # a read that is repeated after a lost link begins at or before the end
        seen += texts(one.feed(start, content[start : start + length]))
    seen += texts(one.feed(one.offset, content[one.offset :]))
    assert seen == [line.decode(errors="replace") for line in lines]
    assert one.rest() == []


def test_a_partial_last_line_is_held_back() -> None:
    one = tail()
    assert texts(one.feed(0, b"whole\nhal")) == ["whole"]
    assert texts(one.feed(9, b"f\n")) == ["half"]


def test_the_rest_is_given_once_in_the_end() -> None:
    one = tail()
    one.feed(0, b"no newline")
    assert texts(one.rest()) == ["no newline"]
    assert one.rest() == []


def test_a_gap_is_never_passed_over() -> None:
    with pytest.raises(ValueError, match="0 to 5"):
        tail().feed(5, b"x")


def test_merges_by_time_and_keeps_each_files_order() -> None:
    east, west = Tail("east", "east", 0), Tail("west", "west", 0)
    a = east.feed(0, b"2030-01-31 12:00:01 a\n  of a\n2030-01-31 12:00:05 b\n2030-01-31 12:00:04 clock set back\n")
    b = west.feed(0, b"2030-01-31T12:00:03Z c\n2030-01-31T12:00:06.5Z d\n")
    merged = texts(merge([a, b]))
    assert [text.split()[-1] for text in merged] == ["a", "a", "c", "b", "back", "d"]


def test_last() -> None:
    assert texts(last(tail().feed(0, b"1\n2\n3\n"), 2)) == ["2", "3"]
    assert last(tail().feed(0, b"1\n"), 0) == []


@pytest.mark.parametrize(
    "raw",
    [b"2030-01-31T12:00:00Z x", b"2030-01-31 12:00:00,000 x", b"[rank0]: 2030-01-31T13:00:00+01:00 x"],
)
def test_times_of_many_forms(raw: bytes) -> None:
    assert line_time(raw) == 1896091200.0


def test_no_time() -> None:
    assert line_time(b"Traceback (most recent call last):") is None
    assert line_time(b"2030-99-99T12:00:00Z x") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10min", 400.0), ("10m", 400.0), ("2 s", 998.0), ("1970-01-01T00:05:00", 300.0), ("1970-01-01", 0.0)],
)
def test_since(text: str, expected: float) -> None:
    assert since_time(text, 1000.0) == expected


def test_since_nonsense_names_the_forms() -> None:
    with pytest.raises(UsageError, match="yesterday") as caught:
        since_time("yesterday", 0.0)
    assert "10min" in caught.value.hint
