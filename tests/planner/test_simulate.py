"""The schedule with what goes wrong, from a seed."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.exchange import Exchange, Late
from islandctl.errors import UsageError
from islandctl.planner import chance
from islandctl.planner.change import Case
from islandctl.planner.make import make_plan, simulate_plan
from islandctl.planner.schedule import Runner, play
from islandctl.planner.simulate import Actor, Outcome, play_out
from islandctl.planner.simulated import spread

CELL = Actor(1.0, 1e-9, 1e-9, 0.1, 0.0, 300.0, 60.0)
SIZES = [10**9] * 4
DAY = 86_400.0


def played(exchange: Exchange, *cells: Actor, windows: int = 50, seed: int = 1, **changes: Any) -> Outcome:
    given: dict[str, Any] = {"checkpoint_every": 100, "checkpoint_s": 0.0, **changes}
    return play_out(exchange, SIZES, cells, windows=windows, seed=seed, **given)


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No jitter, no stragglers, whole links, a relay that stays."""
    monkeypatch.setattr(chance, "JITTER", 0.0)
    monkeypatch.setattr(chance, "STRAGGLER_SHARE", 0.0)
    monkeypatch.setattr(chance, "LINK_SHARES", (1.0, 1.0))
    monkeypatch.setattr("islandctl.planner.outages.RELAY_DAYS", 1e9)


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("mode", ["two-site", "butterfly"])
@pytest.mark.parametrize("overlap", [0, 1, 5, 20, 49])
def test_where_nothing_goes_wrong_it_is_the_plans_own_schedule(overlap: int, mode: Any) -> None:
    exchange = Exchange(overlap=overlap, mode=mode)
    cells = [CELL, CELL._replace(step_s=1.01), CELL._replace(rtt_s=0.3), CELL._replace(up_s_per_byte=3e-9)]
    runners = [Runner(one.step_s, 1 / one.up_s_per_byte, 1 / one.down_s_per_byte, one.rtt_s, 0.0) for one in cells]
    planned = play(exchange, SIZES, runners)
    shares = [step.step_s / (planned.window_s / exchange.window) for step in cells]
    out = played(exchange, *cells, windows=40)
    assert out.computing[-1] == pytest.approx(sum(shares) / len(shares), rel=0.03)
    assert (out.empty, out.partial, out.lost_s) == (0, 0, [])


def test_a_seed_plays_the_same_again() -> None:
    cells = [CELL._replace(between_failures_s=DAY)] * 3
    first, second, other = (played(Exchange(), *cells, windows=300, seed=seed) for seed in (7, 7, 8))
    assert vars(first) == vars(second)
    assert vars(first) != vars(other)


def test_failures_come_as_often_as_told_and_cost_what_they_take() -> None:
    cells = [CELL._replace(between_failures_s=DAY / 8)] * 2
    late = Late(deadline="10 h")
    out = played(Exchange(late=late), *cells, windows=20_000)
    days = out.duration_s / DAY
    assert len(out.lost_s) == pytest.approx(16 * days, rel=0.2)
    # in the middle 300 s away, 60 s to read, 50 steps trained again
    assert spread(out.lost_s).p50 == pytest.approx(410, rel=0.2)
    assert out.empty == 0  # nobody is away for so long, so all wait
    calm = played(Exchange(late=late), CELL, CELL, windows=20_000)
    slower = calm.duration_s * (1 + sum(out.lost_s) / out.duration_s / 2)
    assert out.duration_s > slower * 0.98


def test_a_site_that_is_away_for_long_leaves_empty_rounds_or_is_left_behind() -> None:
    cells = [CELL, CELL, CELL._replace(between_failures_s=DAY, outage_s=6 * 3600.0)]
    wait, alone = (
        played(Exchange(late=Late(deadline="300 s", windows=2, then=then)), *cells, windows=20_000)
        for then in ("wait", "alone")
    )
    assert wait.empty > 0
    assert wait.partial == 0
    assert alone.partial > 0
    assert alone.duration_s < 0.9 * wait.duration_s


@pytest.mark.usefixtures("calm")
def test_a_relay_that_is_away_holds_nobody_longer_than_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("islandctl.planner.outages.RELAY_DAYS", 0.02)
    monkeypatch.setattr("islandctl.planner.outages.RELAY_AWAY_S", 600.0)
    out = played(Exchange(late=Late(relay_away="30 s")), CELL, CELL, windows=1000)
    assert out.relay_restarts > 10
    assert 15.0 < max(out.waits_s) <= 30.0
    assert sum(wait > 15 for wait in out.waits_s) < 2 * out.relay_restarts  # once an absence, not in every round


def test_a_site_goes_away_with_all_its_cells_and_with_the_relay_that_stands_there() -> None:
    """Two sites of two cells; the first one has an outage of an hour four times a day."""
    here = CELL._replace(between_site_outages_s=DAY / 4, site_outage_s=3600.0)
    cells = [here, here, CELL._replace(site=1), CELL._replace(site=1)]
    apart, together = (
        played(Exchange(late=Late(then="alone")), *cells, windows=6_000, relay_site=place) for place in (1, 0)
    )
    for out in (apart, together):
        assert out.site_outages == pytest.approx(4 * out.duration_s / DAY, rel=0.7)
        assert len(out.lost_s) == 2 * out.site_outages
    assert spread(apart.lost_s).p50 == pytest.approx(3600 + 60 + 50, rel=0.6)
    assert 0 < apart.partial < apart.rounds / 5
    assert (apart.relay_restarts, together.relay_restarts) == (0, together.site_outages)
    assert together.partial == 0  # without the relay nobody goes on alone
    assert max(together.waits_s) < 120 < max(apart.waits_s)


@pytest.mark.usefixtures("calm")
def test_the_warm_up_is_the_first_cell_s_alone() -> None:
    cells = [CELL, CELL._replace(down_s_per_byte=2e-9)]
    usual = played(Exchange(), *cells, windows=40)
    warm = played(Exchange(warmup=500), *cells, windows=40, seed_bytes=4 * 10**9)
    # 500 steps of 1 s, 4 s up, 8 s down, and the round trips
    assert warm.warmup_s == pytest.approx(500 + 4 + 8 + 0.25)
    assert warm.duration_s == pytest.approx(warm.warmup_s + usual.duration_s, rel=0.01)
    assert warm.computing[0] == pytest.approx(500 / (504.1 + 512.25), rel=0.01)
    assert len(warm.computing) == 10 + 40
    broken = played(Exchange(warmup=500), CELL._replace(between_failures_s=100.0), CELL, windows=1, seed_bytes=1)
    assert broken.warmup_s > 500 + 300


def test_slow_links_and_checkpoints_take_their_time() -> None:
    quick = played(Exchange(), CELL, CELL)
    thin = played(Exchange(), CELL, CELL._replace(up_s_per_byte=2e-8))
    saving = played(Exchange(), CELL, CELL, checkpoint_s=50.0)
    assert sum(thin.computing) < 0.8 * sum(quick.computing)
    assert sum(saving.computing) == pytest.approx(sum(quick.computing) / 1.5, rel=0.05)


def test_the_case_study_simulated(shipped: Any) -> None:
    recipe, sites = shipped("case-study-32b", "us-b300", "asia-gb300")
    plan, told = simulate_plan(Case(recipe, sites), 3)
    assert plan == make_plan(recipe, sites).model_copy(update={"methods": (), "changes": ()})
    assert (told.cells, told.windows, told.windows_planned) == (2, 2000, 2000)
    assert told.runs > 1
    assert 0.1 < told.failures < 2
    assert told.computing.p10 <= told.computing.p50 <= told.computing.p90 <= 1
    assert plan.totals.duration is not None
    assert told.duration_s.p50 > 0.9 * plan.totals.duration.low


def test_without_a_step_time_nothing_is_played(shipped: Any) -> None:
    case = Case(*shipped("demo", "local-a", "local-b"))
    with pytest.raises(UsageError, match="the step time of local-a is unknown"):
        simulate_plan(case, 0)
    _, told = simulate_plan(case.changed("site.measured.step", "200 ms"), 0)
    assert (told.failures, told.lost_s) == (0, None)
