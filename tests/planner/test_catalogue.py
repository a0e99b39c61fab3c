"""The catalogue of accelerators."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.planner.catalogue import accelerator, catalogue


def test_measured_rates_are_the_ceiling() -> None:
    entry = catalogue()["H100-SXM"]
    assert entry.memory_bytes == 80 * 10**9
    assert entry.matrix_flops == 794e12
    assert (entry.price_low, entry.price_high) == (2.5, 3.5)


def test_without_a_measurement_the_usual_share_of_the_data_sheet() -> None:
    entry = catalogue()["GB300"]
    assert entry.matrix_flops is not None
    assert entry.matrix_flops == pytest.approx(2500e12 * 1745 / 2250, rel=0.01)
    assert "data sheet" in entry.matrix_source
    assert entry.price_low is None


def test_the_case_of_a_name_does_not_matter_and_the_profile_wins(site: Any) -> None:
    known = accelerator(site(gpu__type="h100-sxm", gpu__memory="96 GB"))
    assert known.name == "H100-SXM"
    assert known.memory_bytes == 96 * 10**9


def test_nothing_is_known_of_a_processor(site: Any) -> None:
    known = accelerator(site(gpu__type="cpu"))
    assert known.matrix_flops is known.memory_bytes is known.price_low is None
