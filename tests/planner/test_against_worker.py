"""The planner's sizes are those of the worker's own model and fragment map."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch

from islandctl.config.placement import PlacementRule
from islandctl.config.recipe import ModelRecipe
from islandctl.exchange.fragments import fragment_map, is_exact
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.parameters import named_parameters, parameters, tensors
from islandctl.worker.model import Decoder


@pytest.mark.parametrize("exact", [(), ("*.attention.*", "blocks.1.ffn.up*", "head.*")])
@pytest.mark.parametrize("name", ["demo", "butterfly-8", "case-study-32b"])
@pytest.mark.parametrize("placement", ["strided", "consecutive", "balanced"])
def test_sizes_agree(name: str, placement: PlacementRule, exact: tuple[str, ...], shipped: Any) -> None:
    recipe = shipped(name)[0].value
    exchange = recipe.exchange.model_copy(update={"exact": exact, "placement": placement})
    with torch.device("meta"):
        named = [(key, tuple(value.shape)) for key, value in Decoder(recipe.decoder).named_parameters()]
    made = fragment_map(
        named, exchange.fragments, exchange.chunk, exact, placement=placement, codec=exchange.codec
    ).fragments
    planned = fragment_sizes(recipe.decoder, exchange)
    assert sum(fragment.numel for fragment in made) == parameters(recipe.decoder).total
    assert [(f.numel, len(f.chunks), sum(c.numel for c in f.chunks if c.exact)) for f in made] == [
        (size.values, size.num_chunks, size.small) for size in planned
    ]


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_names_agree(kind: Literal["moe", "dense"]) -> None:
    experts = {"experts": 4, "active_experts": 2} if kind == "moe" else {}
    model = ModelRecipe(kind=kind, layers=3, width=16, heads=4, kv_heads=2, hidden=8, **experts)
    with torch.device("meta"):
        named = dict(Decoder(model).named_parameters())
    planned = {one.name: (one.values, one.few) for one in named_parameters(model)}
    assert planned == {key: (value.numel(), is_exact(key, value.shape)) for key, value in named.items()}
    assert sum(values for values, _ in planned.values()) == parameters(model).total


@pytest.mark.parametrize("name", ["demo", "butterfly-8", "case-study-32b"])
def test_every_tensor_is_counted(name: str, shipped: Any) -> None:
    model = shipped(name)[0].value.model
    with torch.device("meta"):
        built = Counter(tuple(value.shape) for value in Decoder(model).parameters())
    planned: Counter[tuple[int, ...]] = Counter()
    for tensor in tensors(model):
        planned[tensor.shape] += tensor.number
    assert planned == built
