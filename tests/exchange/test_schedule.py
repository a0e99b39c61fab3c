from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.exchange.schedule import Round, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    window = draw(st.integers(1, 60))
    steps = draw(st.integers(1, 300))
    return Schedule(
        steps=steps,
        window=window,
        fragments=draw(st.integers(1, window)),
        overlap=draw(st.integers(0, window - 1)),
        warmup=draw(st.one_of(st.just(0), st.integers(0, steps - 1))),
    )


@given(schedules())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_every_fragment_begins_once_a_window_at_its_step(schedule: Schedule) -> None:
    begun = {step: each for step in range(1, schedule.steps + 1) if (each := schedule.begins_at(step))}
    for step, each in begun.items():
        assert schedule.snapshot_step(each.fragment, each.window) == step
        assert not schedule.is_whole(each.window)
        assert step <= schedule.apply_step(each.fragment, each.window) <= min(step + schedule.overlap, schedule.steps)
    first = schedule.first_window
    begins = {window: schedule.warmup + (window - first) * schedule.window for window in range(first, 400)}
    expected = [
        Round(fragment, window)
        for window in begins
        for fragment in range(schedule.fragments)
        if begins[window] + (fragment + 1) * schedule.window // schedule.fragments <= schedule.steps
    ]
    assert list(begun.values()) == expected
    for fragment in range(schedule.fragments):
        windows = [each.window for each in expected if each.fragment == fragment]
        assert schedule.last_window(fragment) == (windows[-1] if windows else first - 1)
    assert all(each.window < schedule.final_window for each in expected)
    assert schedule.final_window == first or begins[schedule.final_window - 1] < schedule.steps


def test_the_last_fragment_falls_on_the_windows_end() -> None:
    schedule = Schedule(steps=100, window=50, fragments=4, overlap=5)
    assert [schedule.snapshot_step(fragment, 1) for fragment in range(4)] == [62, 75, 87, 100]
    assert schedule.apply_step(3, 1) == 100


@pytest.mark.parametrize(("steps", "window", "final"), [(100, 50, 2), (101, 50, 3), (49, 50, 1)])
def test_final_window_is_the_first_that_is_not_used(steps: int, window: int, final: int) -> None:
    schedule = Schedule(steps=steps, window=window, fragments=2, overlap=0)
    assert schedule.final_window == final
    assert schedule.snapshot_step(0, final) == schedule.apply_step(1, final) == steps


def test_a_warm_up_shifts_the_windows_by_one_and_all_steps_by_its_own() -> None:
    schedule = Schedule(steps=110, window=50, fragments=2, overlap=5, warmup=10)
    assert [schedule.seeds_at(step) for step in (0, 9, 10, 11)] == [False, False, True, False]
    assert all(
        schedule.is_seed(0) and schedule.snapshot_step(p, 0) == schedule.apply_step(p, 0) == 10 for p in (0, 1)
    )
    assert [schedule.snapshot_step(0, window) for window in (1, 2)] == [35, 85]
    assert schedule.begins_at(10) is None
    assert schedule.begins_at(35) == Round(0, 1)
    assert (schedule.final_window, schedule.last_window(1)) == (3, 2)
    assert not any(Schedule(110, 50, 2, 5).seeds_at(step) for step in range(111))


def test_nothing_begins_outside_the_run() -> None:
    schedule = Schedule(steps=10, window=5, fragments=5, overlap=0)
    assert schedule.begins_at(0) is None
    assert schedule.begins_at(11) is None
