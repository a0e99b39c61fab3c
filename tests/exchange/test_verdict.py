from __future__ import annotations

import pytest

from islandctl.exchange.schedule import Schedule
from islandctl.exchange.state import Flight
from islandctl.exchange.verdict import Verdict, judge, names
from islandctl.ledger.entries import Commit, Contribution

SCHEDULE = Schedule(steps=20, window=6, fragments=2, overlap=2)  # fragment 0: 3, 9, 15; final window 4
NOTHING, RESOLVE, WAIT = Verdict.NOTHING, Verdict.RESOLVE, Verdict.WAIT


def flight(window: int = 1, step: int = 9) -> Flight:
    return Flight(window, step, step + 2, tokens=1, snapshot={}, vector={}, payload={})


def commit(window: int = 1, cells: tuple[int, ...] = (0, 1)) -> Commit:
    named = tuple(Contribution(cell=cell, step=9, tokens=1, chunks=("x",)) for cell in cells)
    return Commit(
        seq=5, attempt=1, at="", previous="", fragment=0, window=window, version=1, named=named, reason="complete"
    )


@pytest.mark.parametrize(
    ("step", "flown", "next_commit", "ready", "changes", "expected"),
    [
        (8, None, None, False, {}, NOTHING),
        (10, flight(), commit(), True, {}, NOTHING),  # fixed: not before its step
        (10, flight(), commit(), True, {"arrival": True}, RESOLVE),
        (9, flight(), commit(), True, {"arrival": True}, NOTHING),  # not at the snapshot's own step
        (11, flight(), commit(), True, {}, RESOLVE),
        (11, flight(), commit(), False, {}, WAIT),
        (11, flight(), None, False, {}, WAIT),
        (11, flight(), None, False, {"patient": False}, NOTHING),
        (12, flight(), None, False, {}, NOTHING),  # late: train on
        (12, flight(), commit(), True, {}, RESOLVE),
        (11, flight(), commit(), True, {"recorded": 14}, NOTHING),  # it was late the first time
        (14, flight(), None, False, {"recorded": 14, "patient": False}, WAIT),
        (14, flight(), commit(), True, {"recorded": 14}, RESOLVE),
        (8, None, commit(), True, {}, NOTHING),  # repeating: named, its snapshot comes at 9
        (10, None, commit(), True, {}, NOTHING),
        (8, None, commit(cells=(1,)), True, {}, NOTHING),
        (10, None, commit(cells=(1,)), True, {}, RESOLVE),
        (10, None, commit(cells=(1,)), False, {}, NOTHING),
        (10, None, commit(cells=()), True, {}, RESOLVE),
        (10, flight(), commit(0, (1,)), True, {}, RESOLVE),  # an older round first
        (10, None, commit(4, (1,)), True, {}, RESOLVE),  # the others have ended already
        (20, flight(), commit(), False, {"finishing": True, "patient": False}, WAIT),
        (20, flight(), commit(), True, {"finishing": True}, RESOLVE),
        (20, None, commit(cells=(1,)), False, {"finishing": True}, WAIT),
        (20, None, commit(), True, {"finishing": True}, NOTHING),  # repeating the end: begin the round first
        (20, None, commit(4), True, {"finishing": True}, NOTHING),
        (20, None, commit(), True, {"finishing": True, "recorded": 20}, NOTHING),
    ],
)
def test_verdicts(
    step: int,
    flown: Flight | None,
    next_commit: Commit | None,
    ready: bool,
    changes: dict[str, object],
    expected: Verdict,
) -> None:
    recorded = changes.get("recorded")
    assert recorded is None or isinstance(recorded, int)
    found = judge(
        step,
        0,
        flown,
        next_commit,
        ready=ready,
        cell=0,
        schedule=SCHEDULE,
        arrival=bool(changes.get("arrival")),
        finishing=bool(changes.get("finishing")),
        recorded=lambda window: recorded,
        patient=lambda _: bool(changes.get("patient", True)),
    )
    assert found is expected


def test_names() -> None:
    assert names(commit(cells=(0, 1)), 1)
    assert not names(commit(cells=(1,)), 0)
