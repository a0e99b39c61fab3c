"""Sites of unequal speed: each cell's own steps a window, frozen in the plan and in the run's hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from islandctl.config.exchange import Exchange
from islandctl.errors import ConfigError
from islandctl.ledger.configuration import exchange_hash
from islandctl.planner.change import Case
from islandctl.planner.file import load_plan, plan_text
from islandctl.planner.make import make_plan, simulate_plan
from islandctl.planner.plan import Plan, config_hash


def unequal(recipe: Any, site: Any, **changes: Any) -> tuple[Case, Plan]:
    """Two sites, the first twice as fast as the second."""
    case = Case(recipe(**changes), [site("fast", measured__step="500 ms"), site("slow", measured__step="1 s")])
    return case, make_plan(case.recipe, case.sites)


def use(plan: Plan, name: str) -> float:
    return next(one.use for one in plan.constraints if one.name == name)


def test_each_cell_takes_its_own_steps_and_nobody_waits(recipe: Any, site: Any, tmp_path: Path) -> None:
    _, equal = unequal(recipe, site)
    case, plan = unequal(recipe, site, exchange__pace="measured")
    assert [cell.window for cell in plan.cells] == [71, 35]
    assert [cell.window for cell in equal.cells] == [None, None]
    fast, slow = plan.estimates
    assert (fast.run_step.value, slow.run_step.value) == (71 * 0.5 / 50, 35 / 50)  # type: ignore[union-attr]
    assert fast.overlap is not None
    assert fast.overlap.value == pytest.approx(5 * 71 / 50 * 0.5)
    assert (fast.step.value, fast.tokens_per_s) == (equal.estimates[0].step.value, equal.estimates[0].tokens_per_s)  # type: ignore[union-attr]
    assert fast.window is not None
    assert "50 × 2 steps/s / 1.41 of the mean cell (geometric), within 25 to 100" in fast.window.formula
    assert use(equal, "pace of the slowest") == 0.5
    assert use(plan, "pace of the slowest") < 0.02
    assert equal.totals.computing is not None
    assert plan.totals.computing is not None
    assert (equal.totals.computing.value, plan.totals.computing.value) == (
        pytest.approx(0.5, abs=0.02),
        pytest.approx(0.98, abs=0.02),
    )
    assert plan.totals.tokens == 2 * (71 + 35) * 16 * 32
    assert plan.totals.duration is not None
    assert equal.totals.duration is not None
    assert plan.totals.duration.value == pytest.approx(0.71 * equal.totals.duration.value, rel=0.02)
    said = next(one for one in plan.findings if "each its own number" in one.text)
    assert said.text.startswith("steps a window, each its own number: fast 71 (35.5 s), slow 35 (35")
    assert "slow will wait 1.4% of the time" in said.text
    assert plan.balance == ()
    assert case.changed("fast.measured.step", "1 s").recipe == case.recipe
    (tmp_path / "plan").write_text(plan_text(plan))
    assert load_plan(tmp_path / "plan") == plan


def test_the_slower_ones_wait_is_advised_away(recipe: Any, site: Any) -> None:
    case, plan = unequal(recipe, site)
    (change,) = plan.changes
    assert change.setting == "exchange.pace=measured"
    again = case.changed("exchange.pace", "measured")
    assert [cell.window for cell in make_plan(again.recipe, again.sites).cells] == [71, 35]
    assert change.effect.startswith("pace of the slowest 1.4")
    warned = next(one for one in plan.findings if "will wait 50%" in one.text)
    assert warned.hint.startswith("exchange.pace: measured gives each its own steps a window")
    # what cannot be planned is not advised
    assert unequal(recipe, site, training__steps=110)[1].changes == ()
    assert unequal(recipe, site, exchange__mode="butterfly")[1].changes == ()


def test_the_bound_holds_and_says_so(recipe: Any, site: Any) -> None:
    case = Case(
        recipe(exchange__pace="measured", exchange__pace_bound=1.2),
        [site("fast", measured__step="500 ms"), site("slow", measured__step="1 s")],
    )
    plan = make_plan(case.recipe, case.sites)
    assert [cell.window for cell in plan.cells] == [60, 42]
    warned = next(one for one in plan.findings if "each its own number" in one.text)
    assert warned.level == "warn"
    assert warned.hint.startswith("exchange.pace_bound 1.2 allows no more; raise it, or give slow 1.4 times")


def test_speeds_must_be_known(recipe: Any, site: Any) -> None:
    sites = [site("a"), site("b", gpu__type="cpu", gpu__count=1, gpu__per_node=1, hosts=["b-0"])]
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+:\d+: exchange.pace: .* how fast site b trains") as error:
        make_plan(recipe(exchange__pace="measured"), sites)
    assert "measured.step" in error.value.hint


def test_the_pace_is_in_the_runs_hash_and_equal_runs_keep_theirs(recipe: Any, site: Any) -> None:
    case, plan = unequal(recipe, site, exchange__pace="measured")
    faster = case.changed("fast.measured.step", "400 ms")
    other = make_plan(faster.recipe, faster.sites)
    assert other.config_hash != plan.config_hash
    assert config_hash(plan.recipe, plan.cells) == plan.config_hash
    # as before there was any pace: packets of equal cells are the same bytes
    assert exchange_hash(Exchange(), 2) == "0de7eeda24c59b15adb7474153bc5db943745340c24403fe068a4caa11ce4799"
    assert exchange_hash(Exchange(pace="measured"), 2, (40, 60)) != exchange_hash(
        Exchange(pace="measured"), 2, (60, 40)
    )


def test_what_goes_wrong_is_played_with_the_own_steps(recipe: Any, site: Any) -> None:
    equal, own = (
        simulate_plan(unequal(recipe, site, exchange__pace=pace)[0], seed=3)[1] for pace in ("equal", "measured")
    )
    assert equal.computing.p50 < 0.8
    assert own.computing.p50 > 0.9


def test_a_scripts_speed_is_what_the_profile_says(recipe: Any, site: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    changes = {"model": None, "data": None, "training": {"steps": 100, "batch": 16, "sequence": 32}}
    script = {"worker__command": ["python", "train.py"], "worker__files": ["train.py"], "exchange__pace": "measured"}
    plan = make_plan(
        recipe(**changes, **script), [site("fast", measured__step="500 ms"), site("slow", measured__step="1 s")]
    )
    assert [cell.window for cell in plan.cells] == [71, 35]
    assert plan.totals.tokens == 2 * (71 + 35) * 16 * 32
    with pytest.raises(ConfigError, match="how fast site a trains is not known"):
        make_plan(recipe(**changes, **script), [site("a"), site("b")])
