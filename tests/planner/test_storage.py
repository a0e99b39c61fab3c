"""Checkpoints and failures, against published figures and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.planner import storage
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.parameters import parameters
from islandctl.planner.plan import Figure

BLOOM = 176_247_000_000


def test_a_published_checkpoint_of_176_billion_parameters() -> None:
    """BLOOM: 2.3 TB for fp32 weights, two moments and a bf16 copy; without the copy, as islandctl saves, 2.1 TB."""
    assert storage.saved_bytes(BLOOM, weights=4 + 2) == pytest.approx(2.3e12, rel=0.08)
    assert storage.saved_bytes(BLOOM) == pytest.approx(2.115e12, rel=0.01)


def test_the_published_checkpoint_takes_forty_seconds_on_384_writers(site: Any) -> None:
    shared = storage.write_time(2.3e12, site().value, 1, 384)
    assert shared.high == pytest.approx(40, rel=0.01)
    named = storage.write_time(2.3e12, site("b", storage__write="57.5 GB/s").value, 1, 384)
    assert named.low == pytest.approx(40)


def test_256_accelerators_of_llama_3_fail_every_198_hours(site: Any) -> None:
    hosts = [f"h{number}" for number in range(32)]
    gpu = {"type": "H100-SXM", "count": 256, "per_node": 8}
    own = site(gpu=gpu, hosts=hosts, failures={"rented": False}).value
    rate = storage.failures_per_hour([own])
    assert rate is not None
    between = storage.mean_time_between_failures(rate)
    assert between.value / 3600 == pytest.approx(198, abs=0.5)
    assert between.low == between.high
    rented = storage.failures_per_hour([site(gpu=gpu, hosts=hosts).value])
    assert rented is not None
    assert (rented.low, rented.high) == (pytest.approx(3 * rate.value), pytest.approx(5 * rate.value))


def test_sites_fail_together(site: Any) -> None:
    named = site(failures={"per_gpu": "1000 h"}).value
    both = storage.failures_per_hour([named, named])
    assert both is not None
    assert both.value == pytest.approx(2 * 16 / 1000)
    assert storage.failures_per_hour([site("c", gpu={"type": "cpu", "count": 2, "per_node": 1}).value]) is None


def test_the_best_interval_loses_least() -> None:
    mtbf = Figure(value=36_000, low=36_000, high=36_000, unit="s", formula="by hand")
    best = storage.best_interval(50, mtbf.value)
    assert best == pytest.approx((2 * 50 * 36_000) ** 0.5)
    least = storage.lost_share(best, 50, 10, mtbf).value
    assert least < min(storage.lost_share(best * times, 50, 10, mtbf).value for times in (0.5, 0.8, 1.25, 2))
    by_hand = 50 / best + (best / 2 + 300 + 10) / 36_000
    assert least == pytest.approx(by_hand / (1 + by_hand))


def test_a_checkpoint_holds_the_exchange(recipe: Any) -> None:
    for exchange, per_parameter in (({"mode": "none"}, 12), ({"mode": "two-site", "overlap": 0}, 24)):
        value = recipe(exchange=exchange).value
        counts = parameters(value.model)
        size = storage.checkpoint_bytes(value, counts, fragment_sizes(value.model, value.exchange), 8)
        assert size == per_parameter * counts.total


@pytest.mark.parametrize(
    ("outer", "values"), [({"kind": "average"}, 2), ({"kind": "nesterov"}, 3), ({"kind": "delayed", "delay": 4}, 4)]
)
def test_a_checkpoint_holds_what_the_outer_optimizer_remembers(
    recipe: Any, outer: dict[str, Any], values: int
) -> None:
    value = recipe(exchange__outer=outer, exchange__overlap=0).value
    counts = parameters(value.model)
    size = storage.checkpoint_bytes(value, counts, fragment_sizes(value.model, value.exchange), 8)
    assert size == (12 + 4 * values) * counts.total
