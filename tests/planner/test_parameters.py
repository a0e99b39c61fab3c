"""Parameter counts, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from islandctl.config.recipe import ModelRecipe
from islandctl.planner.parameters import kv_width, parameters


def test_dense_by_hand() -> None:
    model = ModelRecipe(kind="dense", layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocabulary=256)
    counts = parameters(model)
    assert kv_width(model) == 8
    assert counts.embedding == counts.head == 256 * 16
    assert counts.attention == 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16)
    assert counts.norms == 2 * 32 + 16
    assert counts.router == 0
    assert counts.experts == 2 * 3 * 16 * 24
    assert counts.total == 4096 + 1536 + 80 + 2304 + 4096
    assert counts.active == counts.total - counts.embedding


def test_moe_by_hand() -> None:
    model = ModelRecipe(kind="moe", layers=3, width=8, heads=2, hidden=8, experts=4, active_experts=1, vocabulary=256)
    counts = parameters(model)
    assert counts.router == 3 * 8 * 4
    assert counts.experts == 3 * 4 * 3 * 8 * 8
    assert counts.layer == 2 * 8 + 4 * 64 + 8 * 4 + 4 * 192
    assert counts.total == 3 * counts.layer + 8 + 2 * 256 * 8
    assert counts.active == counts.total - counts.embedding - 3 * 3 * 192


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("case-study-32b", 31_990_611_456, 1_272_184_320),
        ("butterfly-8", 2_493_563_904, 228_377_600),
    ],
)
def test_the_shipped_models(name: str, total: int, active: int, shipped: Callable[..., Any]) -> None:
    loaded, _ = shipped(name)
    counts = parameters(loaded.value.model)
    assert (counts.total, counts.active) == (total, active)
