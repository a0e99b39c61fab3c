"""The run's own schedule, played out: by hand, and what must hold for every one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config.exchange import Exchange
from islandctl.planner.schedule import Runner, play


def runner(**changes: float) -> Runner:
    """A cell of a step a second on a link that carries a byte a second, at no distance."""
    values = {"step_s": 1.0, "up_bytes_per_s": 1.0, "down_bytes_per_s": 1.0, "rtt_s": 0.0, "code_s": 0.0}
    return Runner(**{**values, **changes})


def exchange(**changes: Any) -> Exchange:
    """A window of 10 steps, one fragment."""
    return Exchange(**{"window": 10, "fragments": 1, "overlap": 0, **changes})


def test_without_overlap_a_round_stands_in_the_way() -> None:
    """3 s up and 3 s down after 10 s of training."""
    played = play(exchange(), [3], [runner(), runner()])
    assert played.window_s == pytest.approx(16)
    assert played.computing == pytest.approx([10 / 16] * 2)


def test_an_overlap_hides_as_many_steps() -> None:
    assert play(exchange(overlap=6), [3], [runner(), runner()]).computing == pytest.approx([1, 1])
    assert play(exchange(overlap=4), [3], [runner(), runner()]).window_s == pytest.approx(12)


def test_a_round_trip_counts_two_and_a_half_times() -> None:
    """To put, half for the news of the commit, to fetch."""
    assert play(exchange(), [3], [runner(rtt_s=2.0)] * 2).window_s == pytest.approx(16 + 5)


def test_a_link_that_is_too_slow_sets_the_pace_whatever_the_overlap() -> None:
    """Four fragments of 4 bytes a window on a link of a byte a second: 16 s, not 10."""
    played = play(exchange(fragments=4, overlap=9), [4] * 4, [runner(), runner()])
    assert played.window_s == pytest.approx(16, rel=0.05)


def test_the_faster_cell_waits_for_the_slower_one() -> None:
    played = play(exchange(overlap=5), [0], [runner(), runner(step_s=2.0)])
    assert played.computing == pytest.approx([0.5, 1.0], abs=0.01)


def test_everybody_fetches_from_all_others() -> None:
    """Three cells: 3 s up, twice 3 s down."""
    assert play(exchange(), [3], [runner()] * 3).window_s == pytest.approx(19)


def test_a_butterfly_fetches_from_one_and_waits_for_it_alone() -> None:
    cells = [runner() for _ in range(4)]
    assert play(exchange(mode="butterfly"), [3], cells).window_s == pytest.approx(16)
    slow = [*cells[:3], runner(up_bytes_per_s=0.5)]
    assert play(exchange(mode="butterfly"), [3], slow).window_s > 16


_cells = st.lists(
    st.builds(
        Runner,
        step_s=st.floats(1e-3, 1e3),
        up_bytes_per_s=st.floats(1.0, 1e9),
        down_bytes_per_s=st.floats(1.0, 1e9),
        rtt_s=st.floats(0, 1),
        code_s=st.floats(0, 1e-6),
    ),
    min_size=2,
    max_size=5,
)


@given(_cells, st.integers(1, 6), st.integers(0, 9), st.integers(1, 10**6))
def test_nobody_trains_for_more_than_all_the_time(
    cells: list[Runner], fragments: int, overlap: int, size: int
) -> None:
    played = play(exchange(fragments=fragments, overlap=overlap), [size] * fragments, cells)
    assert all(0 < share <= 1 for share in played.computing)
    assert played.window_s >= 10 * max(cell.step_s for cell in cells) * (1 - 1e-9)


@given(_cells, st.integers(1, 6), st.integers(0, 8), st.integers(1, 10**6))
def test_a_longer_overlap_never_makes_it_slower(cells: list[Runner], fragments: int, overlap: int, size: int) -> None:
    short, long = (
        play(exchange(fragments=fragments, overlap=steps), [size] * fragments, cells).window_s
        for steps in (overlap, overlap + 1)
    )
    assert long <= short * (1 + 1e-9)
