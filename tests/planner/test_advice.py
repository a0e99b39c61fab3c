"""What binds, and changes that lift it: each is planned again here as a user would."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.planner.change import Case
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from tests.planner.test_make import big


def replanned(case: Case, setting: str) -> Plan:
    path, _, value = setting.partition("=")
    changed = case.changed(path, value)
    return make_plan(changed.recipe, changed.sites)


def binding(plan: Plan) -> str:
    assert not plan.feasible
    return plan.constraints[0].name


def test_memory_that_does_not_fit(recipe: Any, site: Any) -> None:
    need = make_plan(big(recipe), [site("a"), site("b")]).estimates[0].memory_per_rank.value
    case = Case(big(recipe), [site(name, gpu__memory=f"{0.8 * need:.0f} B") for name in "ab"])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "memory of a rank"
    paths = [change.setting.partition("=")[0] for change in plan.changes]
    assert paths == ["training.precision", "training.batch", "training.recompute"]
    for change in plan.changes:
        assert replanned(case, change.setting).feasible, change
    assert any("layouts that would fit: FSDP" in finding.text for finding in plan.findings)


def test_a_link_that_is_too_slow(recipe: Any, site: Any) -> None:
    slow = {"wan__up": "50 Mbit/s", "wan__down": "50 Mbit/s"}
    case = Case(big(recipe, exchange__late__deadline="1 d"), [site("a", **slow), site("b", **slow)])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "WAN in a window"
    paths = [change.setting.partition("=")[0] for change in plan.changes]
    assert paths[-1] == "site.wan.bandwidth"
    for change in plan.changes:
        assert replanned(case, change.setting).feasible, change


def test_a_tunnel_is_named_where_it_is_narrower_than_the_link(recipe: Any, site: Any) -> None:
    """Two connections with 4 MiB on their way in 400 ms carry 168 Mbit/s: a faster link would not help."""
    tunnel = big(recipe, relay={"host": "controller"})
    case = Case(tunnel, [site(name, wan={"up": "2 Gbit/s", "down": "2 Gbit/s", "rtt": "400 ms"}) for name in "ab"])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "WAN in a window"
    said = next(one for one in plan.findings if one.place == "relay" and one.level == "warn")
    assert "in a 2 connections of one window (4.19 MB) carry no more than 168 Mbit/s" in said.text
    failure = next(one for one in plan.findings if one.level == "fail")
    assert failure.hint.startswith("relay.address")
    assert plan.changes[0].setting == "relay.address=ADDRESS"
    assert replanned(case, plan.changes[0].setting).feasible


def test_what_waits_for_links_is_advised_beside_unequal_sites(recipe: Any, site: Any) -> None:
    """Of what the slower site leaves; each change is planned again."""
    sites = [site("a", measured__step="300 ms"), site("b", measured__step="320 ms")]
    case = Case(big(recipe, exchange__overlap=1), sites)
    plan = make_plan(case.recipe, case.sites)
    paths = [change.setting.partition("=")[0] for change in plan.changes]
    assert "exchange.overlap" in paths
    overlap = next(change for change in plan.changes if change.setting.startswith("exchange.overlap="))
    better = replanned(case, overlap.setting).totals.computing
    assert better is not None
    assert better.value >= 0.99 * 300 / 320


def test_windows_that_are_not_possible_are_passed_over(recipe: Any, site: Any) -> None:
    """With measured pace, checkpoints fall on windows: of 75, 100, 150 … only 100 and 200 can be."""
    slow = {"wan__up": "140 Mbit/s", "wan__down": "140 Mbit/s", "measured__step": "1 s"}
    paced = big(recipe, exchange__pace="measured", training__steps=1000, checkpoint__every=200)
    case = Case(paced, [site("a", **slow), site("b", **slow)])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "WAN in a window"
    assert "exchange.window=100" in [change.setting for change in plan.changes]


def test_what_launch_does_not_run_is_said_beside_the_change(recipe: Any, site: Any) -> None:
    need = make_plan(big(recipe), [site("a"), site("b")]).estimates[0].memory_per_rank.value
    plan = make_plan(big(recipe), [site(name, gpu__memory=f"{0.8 * need:.0f} B") for name in "ab"])
    again = next(change for change in plan.changes if change.setting.startswith("training.recompute="))
    assert again.effect.endswith("launch does not run that yet")
    assert not any(change.effect.endswith("yet") for change in plan.changes if change is not again)


def test_the_least_overlap_that_ends_the_waiting(recipe: Any, site: Any) -> None:
    case = Case(big(recipe, exchange__overlap=1), [site("a"), site("b")])
    plan = make_plan(case.recipe, case.sites)
    assert plan.feasible
    assert plan.totals.computing is not None
    assert plan.totals.computing.value < 0.99
    overlap = next(change for change in plan.changes if change.setting.startswith("exchange.overlap="))
    better = replanned(case, overlap.setting).totals.computing
    assert better is not None
    assert better.value >= 0.99
    one_less = int(overlap.after) - 1
    worse = replanned(case, f"exchange.overlap={one_less}").totals.computing
    assert worse is not None
    assert worse.value < 0.99


def test_a_deadline_that_cannot_be_met(recipe: Any, site: Any) -> None:
    case = Case(big(recipe, exchange__late__deadline="100 ms"), [site("a"), site("b")])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "round's deadline"
    deadline = next(change for change in plan.changes if change.setting.startswith("exchange.late.deadline="))
    assert replanned(case, deadline.setting).feasible


def test_too_little_space(recipe: Any, site: Any) -> None:
    case = Case(big(recipe, checkpoint__keep=3), [site("a", storage__free="130 GB"), site("b")])
    plan = make_plan(case.recipe, case.sites)
    assert binding(plan) == "space for checkpoints"
    assert plan.changes[0].setting == "checkpoint.keep=2"  # the worker never keeps fewer
    for change in plan.changes:
        assert replanned(case, change.setting).feasible


def test_a_plan_without_trouble_has_no_advice(shipped: Any) -> None:
    for case in (("case-study-32b", "us-b300", "asia-gb300"), ("demo", "local-a", "local-b")):
        assert make_plan(*shipped(*case)).changes == ()


def test_a_model_that_fits_nowhere_says_so(recipe: Any, site: Any) -> None:
    huge = big(recipe, model__width=262144, model__hidden=1048576)
    plan = make_plan(huge, [site("a"), site("b")])
    assert not plan.feasible
    assert any("no layout of FSDP, tensor, expert and pipeline" in finding.text for finding in plan.findings)


def test_the_scarcest_comes_first(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a"), site("b")])
    uses = [one.use for one in plan.constraints]
    assert uses == sorted(uses, reverse=True)
    assert len({one.name for one in plan.constraints}) == len(plan.constraints)


def test_connections_bound_a_far_link(recipe: Any, site: Any) -> None:
    """Two nodes with a tunnel each, 4 MiB on its way in 100 ms: 671 Mbit/s, whatever the bandwidth."""
    direct = make_plan(big(recipe), [site("a"), site("b")])
    tunnels = make_plan(big(recipe, relay={"host": "controller"}), [site("a"), site("b")])
    size = max(one.exchange.value for one in tunnels.estimates)
    assert size > 5 * max(one.exchange.value for one in direct.estimates)
    assert any("set relay.address" in finding.hint for finding in tunnels.findings)
    wider = make_plan(big(recipe, relay={"host": "controller"}), [site(n, wan__window="1 GiB") for n in "ab"])
    assert max(one.exchange.value for one in wider.estimates) == pytest.approx(
        max(one.exchange.value for one in direct.estimates)
    )


def test_what_was_measured_takes_the_place_of_what_is_assumed(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site(n, measured={"step": "300 ms", "memory": "20 GB"}) for n in "ab"])
    first = plan.estimates[0]
    assert first.step is not None
    assert (first.step.low, first.step.high, first.step.assumed) == (0.3, 0.3, False)
    assert (first.memory_per_rank.value, first.memory_per_rank.assumed) == (20e9, False)


def test_no_bandwidth_is_promised_that_the_connections_do_not_carry(recipe: Any, site: Any) -> None:
    """Four connections a rank with 4 MiB on their way in 100 ms carry 21 Gbit/s, whatever the link."""
    plan = make_plan(big(recipe, exchange__overlap=2), [site("a"), site("b")])
    assert plan.methods
    assert all(one.name != "this recipe" for one in plan.methods)


def test_a_site_without_storage_is_planned_without_it(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a"), site("b", storage={"write": "5 GB/s", "free": "10 TB"})])
    assert plan.feasible
    assert any(one.place == "site a" and "checkpoints are left out here" in one.text for one in plan.findings)
    assert plan.totals.best_checkpoint_every is None
    assert plan.totals.duration is not None


def test_the_bandwidth_that_the_recipe_takes_is_enough(recipe: Any, site: Any) -> None:
    near = {"up": "8 Gbit/s", "down": "8 Gbit/s", "rtt": "5 ms"}  # so that 64 connections carry whatever is asked
    case = Case(big(recipe, exchange__overlap=2), [site("a", wan=near), site("b", wan=near)])
    plan = make_plan(case.recipe, case.sites)
    own = plan.methods[0]
    assert own.name == "this recipe"
    for wanted, rate in own.bandwidth.items():
        computing = replanned(case, f"site.wan.bandwidth={rate:.0f} bit/s").totals.computing
        assert computing is not None
        assert computing.value >= float(wanted) - 1e-6
        less = replanned(case, f"site.wan.bandwidth={rate / 1.03:.0f} bit/s").totals.computing
        assert less is not None
        assert less.value < float(wanted)
