"""Whole plans: figures by hand, findings at their borders, and the shipped cases."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from islandctl.errors import ConfigError
from islandctl.planner.change import Case
from islandctl.planner.limits import not_yet
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Finding, Plan


def found(plan: Plan, level: Literal["ok", "warn", "fail"], words: str) -> list[Finding]:
    return [finding for finding in plan.findings if finding.level == level and words in finding.text]


def test_the_demo_fits_and_says_what_it_does_not_know(shipped: Any) -> None:
    plan = make_plan(*shipped("demo", "local-a", "local-b"))
    assert plan.feasible
    assert plan.cost_per_hour is None
    assert {finding.level for finding in plan.findings} == {"ok"}
    for estimate in plan.estimates:
        assert estimate.step is None
        assert estimate.link_share is None
        assert estimate.memory_limit is not None
        assert estimate.memory_per_rank.high < 2**30 < estimate.memory_limit.value
        # chunks of 66 kB, four at a time, each a round trip of 150 ms: less than the link's 50 Mbit/s
        assert estimate.exchange.value == pytest.approx(2 * 533_784 / (4 * 66_700 / 0.15) + 2.5 * 0.15, rel=0.01)
    assert found(plan, "ok", "the step time is unknown here: all is hidden if a step takes at least 337 ms")


def test_the_case_study_fits_and_its_link_has_room(shipped: Any) -> None:
    plan = make_plan(*shipped("case-study-32b", "us-b300", "asia-gb300"))
    for estimate in plan.estimates:
        assert estimate.bytes_up_per_window.value * 8 / 25e9 == pytest.approx(10.3, abs=0.05)
        assert estimate.bytes_down_per_window.value == estimate.bytes_up_per_window.value
        assert estimate.link_share is not None
        assert 0.2 < estimate.link_share.low < estimate.link_share.high < 0.8
        assert estimate.overlap is not None
        assert estimate.exchange.high < estimate.overlap.low
        assert estimate.memory_limit is not None
        assert estimate.memory_per_rank.high < estimate.memory_limit.value == 288e9
    assert found(plan, "ok", "hidden by overlap 12")
    assert plan.feasible
    (job,) = (finding.text for finding in found(plan, "ok", "a job: sbatch") if finding.place == "us-b300")
    assert job.startswith("a job: sbatch --nodes=20 --ntasks-per-node=1 --cpus-per-task=192 --mem=0 --gres=gpu:8 ")


def test_the_butterfly_is_planned(shipped: Any) -> None:
    plan = make_plan(*shipped("butterfly-8", "butterfly-gb300"))
    assert plan.feasible
    assert len(plan.cells) == len(plan.estimates) == 8
    assert all(e.bytes_down_per_window.value == e.bytes_up_per_window.value for e in plan.estimates)
    assert found(plan, "ok", "a job: sbatch --nodes=2 ")[0].place == "gb300-0 … gb300-7 (8)"
    assert found(plan, "ok", "memory of a rank")[0].place == "gb300-0 … gb300-7 (8)"


@pytest.mark.parametrize(("cells", "bytes_each"), [(2, 8), (4, 16), (8, 24)])
def test_a_butterfly_keeps_a_reference_and_a_residual_for_every_partner(
    recipe: Any, site: Any, cells: int, bytes_each: int
) -> None:
    def node_memory(**changes: Any) -> float:
        plan = make_plan(recipe(exchange__cells=cells, **changes), [site("a"), site("b")])
        assert plan.estimates[0].node_memory is not None
        return plan.estimates[0].node_memory.value

    more = node_memory(exchange__mode="butterfly") - node_memory()
    total = make_plan(recipe(), [site("a"), site("b")]).parameters_total
    per_node = max(1, cells // 4)  # cells that share a node of eight
    assert more == pytest.approx((bytes_each - 12) * total * per_node / max(1, 4 // cells), rel=0.01)


def test_a_cell_fetches_from_all_others_and_not_from_itself(recipe: Any, site: Any) -> None:
    plan = make_plan(recipe(), [site("a"), site("b"), site("c")])
    estimate = plan.estimates[0]
    assert estimate.bytes_down_per_window.value == 2 * estimate.bytes_up_per_window.value
    assert estimate.bytes_up_per_window.assumed is False


def test_one_cell_alone_exchanges_nothing(recipe: Any, site: Any) -> None:
    plan = make_plan(recipe(exchange__mode="none"), [site()])
    assert plan.feasible
    assert plan.estimates[0].bytes_up_per_window.value == plan.estimates[0].exchange.value == 0
    assert found(plan, "ok", "nothing is exchanged")


def test_step_time_by_hand(recipe: Any, site: Any) -> None:
    loaded = recipe(training__batch=1_600_000, training__sequence=1000)
    plan = make_plan(loaded, [site("a"), site("b", gpu__bf16="794 TFLOP/s")])
    first, second = plan.estimates
    assert first.step is not None
    assert second.step is not None
    flops = 1.6e9 * (6 * plan.parameters_active + 6 * 4 * 16 * 1000) / (16 * 794e12)
    kept = 4 * (4 * (7 * 16 + 3 * 8 + 2 * (4 * 8 + 2 * 16)) + 4 * 4) + 12 * 256
    memory = (1.6e9 * 5 * kept + 28 * plan.parameters_total) / (16 * 3.35e12)
    traffic = plan.parameters_total * 12 * 15 / 16 / 450e9  # a node's eight adapters carry its part faster
    assert first.step.low == pytest.approx(flops / 0.40 + memory + traffic / 4)
    assert first.step.high == pytest.approx(flops / 0.25 + memory + traffic / 0.65 / 4)
    assert second.step.low == first.step.low
    assert "gpu.bf16 of the profile" in second.step.formula
    assert first.tokens_per_s is not None
    assert first.tokens_per_s.value == pytest.approx(1.6e9 / first.step.value)


def test_a_small_model_is_not_infinitely_fast(recipe: Any, site: Any) -> None:
    """The demo's model on real accelerators: its arithmetic takes microseconds, its steps do not."""
    plan = make_plan(recipe(), [site("a"), site("b")])
    step = plan.estimates[0].step
    assert step is not None
    assert step.high >= 4 * 2e-3
    assert plan.feasible


def big(recipe: Any, **changes: Any) -> Any:
    """A dense model of 1.6 billion parameters; a step of about a quarter of a second on 16 H100."""
    model = {"kind": "dense", "layers": 24, "width": 2048, "heads": 16, "hidden": 8192, "vocabulary": 256}
    base = {"model": model, "training__batch": 32, "training__sequence": 2048, "exchange__fragments": 8}
    return recipe(**{**base, **changes})


def test_memory_that_cannot_fit_names_what_binds(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a"), site("b", gpu__memory="6 GB")])
    assert not plan.feasible
    (failure,) = found(plan, "fail", "memory of a rank: needs")
    assert failure.place == "b"
    assert "gpu.memory of the profile" in failure.text
    assert plan.findings[0] == failure


def test_memory_that_may_not_fit_is_a_warning(recipe: Any, site: Any) -> None:
    enough = make_plan(big(recipe), [site("a"), site("b")]).estimates[1].memory_per_rank
    between = (enough.value + enough.high) / 2
    plan = make_plan(big(recipe), [site("a"), site("b", gpu__memory=f"{between:.0f} B")])
    assert plan.feasible
    assert found(plan, "warn", "may not fit")


def test_a_node_without_memory_for_the_anchors(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a"), site("b", cpu__memory="4 GiB")])
    assert [finding.place for finding in found(plan, "fail", "memory of a node: needs")] == ["b"]


def test_ranks_on_processors_share_the_memory_of_their_node(recipe: Any, site: Any) -> None:
    cpu = {"gpu": {"type": "cpu", "count": 4, "per_node": 4}, "hosts": ["x"], "cpu__memory": "4 GiB"}
    plan = make_plan(recipe(exchange__mode="butterfly", exchange__cells=2), [site(**cpu)])
    assert [estimate.memory_limit.value for estimate in plan.estimates if estimate.memory_limit] == [2**30, 2**30]
    assert plan.estimates[0].node_memory is None


def test_a_link_slower_than_the_overlap_says_how_long_it_waits(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe, exchange__overlap=1), [site("a"), site("b")])
    assert plan.feasible
    (warning, *_) = found(plan, "warn", "training waits")
    estimate = plan.estimates[0]
    assert estimate.wait_per_window is not None
    assert estimate.overlap is not None
    as_the_largest = 8 * (estimate.exchange.value - estimate.overlap.value)
    assert 0.9 * as_the_largest < estimate.wait_per_window.value < as_the_largest
    needed = int(warning.hint.split()[1])
    better = make_plan(big(recipe, exchange__overlap=needed), [site("a"), site("b")])
    assert not found(better, "warn", "training waits")


def test_a_link_slower_than_the_window_is_a_failure(recipe: Any, site: Any) -> None:
    slow = {"wan__up": "50 Mbit/s"}
    plan = make_plan(big(recipe, exchange__late__deadline="1 d"), [site("a"), site("b", **slow)])
    assert not plan.feasible
    assert found(plan, "fail", "training would always wait")


def test_rounds_that_cannot_meet_their_deadline(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe, exchange__late__deadline="100 ms"), [site("a"), site("b", wan__up="1 Gbit/s")])
    (failure,) = found(plan, "fail", "its rounds would all end empty")
    assert failure.place == "b"
    assert "1 Gbit/s (125 MB/s)" in failure.text


def test_the_emulated_link_counts(recipe: Any, site: Any) -> None:
    plain = make_plan(recipe(), [site("a"), site("b")])
    emulated = make_plan(recipe(relay__emulate={"bandwidth": "1 Mbit/s", "rtt": "1 s"}), [site("a"), site("b")])
    assert emulated.estimates[0].exchange.value > plain.estimates[0].exchange.value + 2.2


def test_cells_of_unequal_speed(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a"), site("b", gpu__bf16="60 TFLOP/s")])
    assert found(plan, "warn", "a will wait")


def test_checkpoints_and_free_storage(recipe: Any, site: Any) -> None:
    plan = make_plan(big(recipe), [site("a", storage__free="10 GB"), site("b", storage__free="1 TB")])
    assert [finding.place for finding in found(plan, "fail", "checkpoints: ")] == ["site a"]
    assert [finding.place for finding in found(plan, "ok", "checkpoints: ")] == ["site b"]


def test_cost_from_catalogue_and_profile(recipe: Any, site: Any) -> None:
    cost = make_plan(recipe(), [site("a"), site("b", price__gpu="3 USD/h")]).cost_per_hour
    assert cost is not None
    assert (cost.low, cost.high) == (16 * 2.5 + 16 * 3, 16 * 3.5 + 16 * 3)
    assert "catalogue, 2026-05" in cost.formula
    with_egress = make_plan(recipe(), [site("a"), site("b", price={"gpu": "3 USD/h", "egress": "1 USD/GB"})])
    assert with_egress.cost_per_hour is not None
    assert with_egress.cost_per_hour.high > cost.high
    unknown = make_plan(recipe(), [site("a"), site("b", gpu__type="B300")])
    assert unknown.cost_per_hour is None
    assert found(unknown, "warn", "no price known")[0].place == "site b"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("H100", "did you mean H100-SXM?"), ("h100sxm", "did you mean H100-SXM?"), ("TPU", "A100-S")],
)
def test_an_unknown_accelerator(recipe: Any, site: Any, written: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(recipe(), [site("a"), site("b", gpu__type=written)])
    assert f"accelerator '{written}' is not in the catalogue" in str(caught.value)
    assert meant in str(caught.value)


def test_an_accelerator_of_the_profile(recipe: Any, site: Any) -> None:
    plan = make_plan(recipe(), [site("a"), site("b", gpu__type="TPU", gpu__memory="95 GB")])
    assert plan.estimates[1].step is None
    assert plan.estimates[1].memory_limit is not None
    assert plan.estimates[1].memory_limit.value == 95e9


def test_a_pattern_of_exact_that_fits_nothing_is_refused(recipe: Any, site: Any) -> None:
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+:\d+: exchange.exact: no parameter .* fits 'router'"):
        make_plan(recipe(exchange__exact=["*.q.*", "router"]), [site("a"), site("b")])


def test_more_fragments_than_layers_names_the_place(recipe: Any, site: Any) -> None:
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+:\d+: exchange.fragments: 5 fragments are more than"):
        make_plan(recipe(exchange__fragments=5), [site("a"), site("b")])


@pytest.mark.parametrize(
    "changes",
    [
        {"exchange__codec": "bf16", "training__precision": "bfloat16"},
        {"exchange__apply": "blend", "exchange__when": "arrival"},
        {"exchange__cells": 4},
        {"exchange__cells": 4, "exchange__mode": "butterfly"},
    ],
)
def test_what_launch_runs(recipe: Any, site: Any, changes: dict[str, Any]) -> None:
    plan = make_plan(recipe(**changes), [site("a"), site("b")])
    assert not_yet(plan) == []


def test_every_figure_lies_in_its_range_and_says_where_it_comes_from(shipped: Any) -> None:
    for case in (("case-study-32b", "us-b300", "asia-gb300"), ("demo", "local-a", "local-b")):
        for estimate in make_plan(*shipped(*case)).estimates:
            figures = [value for _, value in estimate if hasattr(value, "formula")]
            assert len(figures) >= 5
            for figure in figures:
                assert figure.low <= figure.value <= figure.high
                assert figure.formula


def test_many_sites(recipe: Any, site: Any) -> None:
    one = site()
    many = [
        type(one)(one.value.model_copy(update={"name": f"s{number}"}), one.path, one.text_hash, one.places)
        for number in range(200)
    ]
    plan = make_plan(recipe(), many)
    assert len(plan.estimates) == 200
    assert plan.estimates[0].bytes_down_per_window.value == 199 * plan.estimates[0].bytes_up_per_window.value


def test_the_case_study_at_four_bits_is_132_gigabits(shipped: Any) -> None:
    """5.3 s of a window at 25 Gbit/s, as 4 bits and their scales come to."""
    loaded, sites = shipped("case-study-32b", "us-b300", "asia-gb300")
    case = Case(loaded, sites).changed("exchange.codec", "int4")
    plan = make_plan(case.recipe, case.sites)
    assert plan.feasible
    for estimate in plan.estimates:
        bits = estimate.bytes_up_per_window.value * 8
        assert bits == pytest.approx(132e9, rel=0.005)
        assert bits / 25e9 == pytest.approx(5.3, abs=0.03)


def test_only_fragments_that_take_longer_than_the_overlap_are_waited_for(recipe: Any, site: Any) -> None:
    """The largest fragment, with the embedding, is late; the others are hidden."""
    plan = make_plan(
        big(recipe, model__vocabulary=400_000, exchange__fragments=8, exchange__overlap=5), [site("a"), site("b")]
    )
    estimate = plan.estimates[0]
    assert estimate.wait_per_window is not None
    assert estimate.overlap is not None
    late = estimate.exchange.value - estimate.overlap.value
    assert late > 0
    assert estimate.wait_per_window.value < 4 * late


def test_the_slowest_way_up_is_that_whose_bytes_come_last(recipe: Any, site: Any) -> None:
    """Of two equal links the one with the longer round trip."""
    near = {"up": "8 Gbit/s", "down": "8 Gbit/s", "rtt": "1 ms"}
    far = near | {"rtt": "200 ms"}
    plan = make_plan(big(recipe), [site("a", wan=near), site("b", wan=far)])
    first, second = (one.exchange.value for one in plan.estimates)
    assert second - first == pytest.approx(1.5 * 0.199)
    alone = make_plan(big(recipe), [site("a", wan=near), site("b", wan=near)])
    assert first - alone.estimates[0].exchange.value == pytest.approx(0.199)
