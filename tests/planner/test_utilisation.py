"""Compute utilisation against bandwidth, held against the published simulation and against arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.planner.utilisation import WANTED, Job, Method, bandwidth_for, first_reaching, methods, utilisation
from tests.planner.published import GRID_GBIT, SHARES, notches, rows


def _published_notches() -> list[int]:
    found = []
    for row in rows("wan_utilisation.csv"):
        layers = int(row["layers"])
        method = next(one for one in methods(layers, 100) if one.name == row["method"])
        job = Job(layers=layers, parameters=float(row["parameters"]), step_s=float(row["step_seconds"]))
        shares = [utilisation(method, job, bits_per_s=rate * 1e9) for rate in GRID_GBIT]
        for column, wanted in SHARES.items():
            rate = first_reaching(wanted, GRID_GBIT, shares)
            assert rate is not None
            found.append(notches(rate, float(row[column])))
    return found


def test_the_published_table() -> None:
    """All 75 within two notches of the source's grid, at least 70 within one, none optimistic by more than one."""
    found = _published_notches()
    assert len(found) == 75
    assert max(map(abs, found)) <= 2
    assert sum(abs(number) <= 1 for number in found) >= 70
    assert min(found) >= -1


def test_data_parallel_on_a_slow_link_is_the_ratio_of_times() -> None:
    """1,000 values of 16 bits at 16 kbit/s take one second a step, of which nothing but the way back is hidden."""
    method = methods(10, 50)[0]
    share = utilisation(method, Job(layers=10, parameters=1e3, step_s=0.001), bits_per_s=16e3)
    assert share == pytest.approx(0.001, rel=0.01)


def test_an_overlap_of_a_step_hides_what_a_step_carries() -> None:
    """A window of 4 steps, 4 fragments of one layer, each 0.9 steps on the link: all of it is hidden, or none."""
    hidden = Method(name="m", window=4, fragments=4, overlap=1, bits=1)
    bare = hidden.model_copy(update={"overlap": 0})
    job = Job(layers=4, parameters=4, step_s=1)
    assert utilisation(hidden, job, bits_per_s=1 / 0.9) == 1.0
    assert 0.5 < utilisation(bare, job, bits_per_s=1 / 0.9) < 0.75


_methods = st.builds(
    Method,
    name=st.just("m"),
    window=st.integers(8, 40),
    fragments=st.integers(1, 8),
    overlap=st.integers(0, 7),
    bits=st.sampled_from([4.0, 16.0]),
)


@given(_methods, st.integers(8, 24), st.floats(1e3, 1e12), st.floats(1.1, 100))
def test_a_faster_link_never_computes_less(method: Method, layers: int, rate: float, factor: float) -> None:
    job = Job(layers=layers, parameters=1e9, step_s=0.5)
    slow, fast = (utilisation(method, job, bits_per_s=one) for one in (rate, rate * factor))
    assert 0 < slow <= 1 + 1e-9
    assert slow <= fast * (1 + 1e-9)


@pytest.mark.parametrize("wanted", WANTED)
def test_the_bandwidth_for_a_share_gives_that_share(wanted: float) -> None:
    for method in methods(24, 100):
        job = Job(layers=24, parameters=1e9, step_s=0.1)
        rate = bandwidth_for(wanted, method, job)
        assert utilisation(method, job, bits_per_s=rate) >= wanted
        assert utilisation(method, job, bits_per_s=rate / 1.02) < wanted


def test_a_window_of_a_billion_steps_costs_no_more_to_play_than_a_short_one() -> None:
    """Steps in which nothing happens are skipped: this took the machine's memory once."""
    for method in methods(24, 10**9):
        share = utilisation(method, Job(layers=24, parameters=1e9, step_s=0.1), bits_per_s=1e10)
        assert share > 0.99 or method.window == 1
