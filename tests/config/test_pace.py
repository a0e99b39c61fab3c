from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from islandctl.config.exchange import Exchange
from islandctl.config.pace import Pace, paced
from islandctl.config.recipe import Recipe
from islandctl.exchange.schedule import Schedule
from tests.worker.rehearsal import recipe

WINDOWS = 3


@st.composite
def paces(draw: st.DrawFn) -> tuple[Pace, Schedule]:
    fragments = draw(st.integers(1, 12))
    window, own = draw(st.integers(fragments, 60)), draw(st.integers(fragments, 60))
    warmup = draw(st.sampled_from([0, window]))
    pace = Pace(window=window, own=own, fragments=fragments, warmup=warmup)
    return pace, Schedule(warmup + WINDOWS * window, window, fragments, draw(st.integers(0, window - 1)), warmup)


@given(paces())
@settings(max_examples=80, derandomize=True, deadline=None)
def test_every_cell_passes_the_same_snapshots_results_and_windows_in_one_order(made: tuple[Pace, Schedule]) -> None:
    pace, schedule = made
    first, own, warmup = schedule.first_window, pace.own, pace.warmup
    events = []
    for window in range(first, first + WINDOWS):
        begin, own_begin = warmup + (window - first) * pace.window, warmup + (window - first) * own
        assert pace.own_step(begin) == own_begin
        for fragment in range(pace.fragments):
            snapshot = schedule.snapshot_step(fragment, window)
            taken = pace.own_step(snapshot)
            assert taken == own_begin + (fragment + 1) * own // pace.fragments
            assert pace.reaches(snapshot, taken)
            due = snapshot + schedule.overlap
            applied = pace.own_step(due)
            assert taken + (schedule.overlap > 0) <= applied <= taken + own
            # in proportion, but for what whole steps and whole snapshots take
            assert abs((applied - taken) - schedule.overlap * own / pace.window) <= 2 + own / pace.window
            events += [(snapshot, taken), (due, applied)]
    # what comes later for the run never comes earlier in the cell; nothing of behind a snapshot comes at or before it
    events.sort()
    assert all(left[1] <= right[1] for left, right in pairwise(events))
    for snapshot, taken in events:
        assert all(
            (step > snapshot) == (own_step > taken) for step, own_step in events if pace.reaches(snapshot, taken)
        )


@given(paces())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_steps_there_and_back(made: tuple[Pace, Schedule]) -> None:
    pace, schedule = made
    last = pace.own_step(schedule.steps)
    assert last == pace.warmup + WINDOWS * pace.own
    assert pace.windows(last) == WINDOWS
    for own in range(last + 1):
        reached = pace.run_step(own)
        assert pace.own_step(reached) <= own < pace.own_step(reached + 1)
        assert reached <= pace.position(own) < reached + 1
    for step in range(schedule.steps + 1):
        own = pace.own_step(step)
        assert pace.run_step(own) >= step > pace.run_step(own - 1)
        begins = pace.at(step)
        assert pace.reaches(step, begins) or pace.run_step(begins) < step < pace.run_step(begins + 1)


def test_a_cell_at_the_runs_own_pace_counts_as_the_run_does() -> None:
    pace = Pace.of(Exchange(window=20, fragments=3), None)
    assert all(pace.own_step(n) == pace.run_step(n) == pace.position(n) == pace.at(n) == n for n in range(70))


def test_steps_follow_speed_within_the_bound() -> None:
    exchange = Exchange(window=50, pace="measured")
    assert paced([1.0, 1.0], exchange) == (50, 50)
    assert paced([2.0, 1.0], exchange) == (71, 35)
    assert paced([4.0, 1.0], exchange) == (100, 25)
    assert paced([9.0, 1.0], exchange) == (100, 25)
    assert paced([3.0, 1.0, 1.0], Exchange(window=50, pace="measured", pace_bound=1.5)) == (75, 35, 35)
    assert paced([9.0, 1.0], Exchange(window=12, fragments=10, pace="measured")) == (24, 10)
    with pytest.raises(ValidationError, match="fewer than 4 fragments"):
        Pace.of(Exchange(), 3)


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        ({"mode": "butterfly", "pace": "measured"}, "half and half"),
        ({"mode": "none", "pace": "measured"}, "waits for nobody"),
        ({"pace_bound": 2}, "pace_bound is for pace: measured"),
    ],
)
def test_what_unequal_steps_do_not_go_with(exchange: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Exchange.model_validate(exchange)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "6 steps are no whole windows of 8.*nearest: 8"),
        ({"checkpoint": {"every": 8}, "training": {"steps": 30}}, "30 steps .* nearest: 24 or 32"),
        ({"checkpoint": {"every": 8}}, ""),
    ],
)
def test_cells_of_unequal_pace_meet_where_a_window_ends(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, dict[str, int]], said: str
) -> None:
    text = tmp_path_factory.getbasetemp()
    made = recipe(text, exchange={"mode": "two-site"}, **changes).model_dump(mode="json")
    made["exchange"]["pace"] = "measured"
    if not said:
        assert Recipe.model_validate(made).exchange.bound == 2
        return
    with pytest.raises(ValidationError, match=said):
        Recipe.model_validate(made)
