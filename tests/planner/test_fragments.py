"""Bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config.exchange import Exchange
from islandctl.config.recipe import ModelRecipe
from islandctl.planner.fragments import CODEC_HEADER_BYTES, fragment_sizes
from islandctl.planner.parameters import parameters

MODEL = ModelRecipe(kind="moe", layers=5, width=16, heads=4, hidden=8, experts=4, active_experts=2)


@pytest.mark.parametrize(("codec", "small_bytes", "large_bytes"), [("fp32", 4, 4), ("bf16", 2, 2)])
def test_plain_codecs(codec: Literal["fp32", "bf16"], small_bytes: int, large_bytes: int) -> None:
    for size in fragment_sizes(MODEL, Exchange(fragments=2, codec=codec, chunk=1000)):
        assert size.num_chunks == -(-size.small // 1000) - (-size.large // 1000)
        values = small_bytes * size.small + large_bytes * size.large
        assert size.encoded_bytes == values + CODEC_HEADER_BYTES * size.num_chunks


@pytest.mark.parametrize(
    ("codec", "block", "bits", "per_scale"),
    [("int8", None, 8, 256), ("int4", None, 4, 128), ("int4", 50, 4, 50), ("2bit", None, 2, 64)],
)
def test_a_scale_for_every_started_block_of_a_chunk(
    codec: Literal["int8", "int4", "2bit"], block: int | None, bits: int, per_scale: int
) -> None:
    (size,) = fragment_sizes(MODEL, Exchange(fragments=1, codec=codec, block=block, chunk=301))
    chunks = [min(301, size.large - start) for start in range(0, size.large, 301)]
    scales = sum(-(-values // per_scale) for values in chunks)
    codes = sum(-(-values * bits // 8) for values in chunks)
    assert size.encoded_bytes == 2 * size.small + codes + 2 * scales + CODEC_HEADER_BYTES * size.num_chunks


def test_what_exact_names_goes_as_bf16() -> None:
    (plain,) = fragment_sizes(MODEL, Exchange(fragments=1))
    (asked,) = fragment_sizes(MODEL, Exchange(fragments=1, exact=("*.attention.k.*", "head.weight")))
    assert asked.small - plain.small == plain.large - asked.large == 5 * 16 * 16 + 256 * 16


@given(st.integers(1, 40), st.data())
def test_fragments_are_a_partition(layers: int, data: st.DataObject) -> None:
    model = MODEL.model_copy(update={"layers": layers})
    num = data.draw(st.integers(1, min(layers, 50)))
    sizes = fragment_sizes(model, Exchange(fragments=num))
    counts = parameters(model)
    assert len(sizes) == num
    assert sum(size.values for size in sizes) == counts.total
    assert sum(size.small for size in sizes) == counts.embedding + counts.norms + counts.router
    assert max(size.values for size in sizes) - min(size.values for size in sizes) <= counts.layer + 2 * counts.head


def test_more_fragments_than_layers() -> None:
    with pytest.raises(ValueError, match="6 fragments are more than the model's 5 layers"):
        fragment_sizes(MODEL, Exchange(fragments=6))


def test_one_cell_alone_may_have_fewer_layers_than_the_usual_fragments() -> None:
    thin = MODEL.model_copy(update={"layers": 2})
    assert len(fragment_sizes(thin, Exchange(mode="none"))) == 2


def test_the_case_study_needs_ten_seconds_a_window(shipped: Callable[..., Any]) -> None:
    recipe, _ = shipped("case-study-32b")
    total = sum(size.encoded_bytes for size in fragment_sizes(recipe.value.decoder, recipe.value.exchange))
    assert total * 8 / 25e9 == pytest.approx(10.3, abs=0.05)
