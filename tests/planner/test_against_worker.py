"""The planner's sizes are those of the worker's own model and fragment map."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from islandctl.exchange.fragments import fragment_map
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.parameters import parameters, tensors
from islandctl.worker.model import Decoder


@pytest.mark.parametrize("name", ["demo", "butterfly-8", "case-study-32b"])
def test_every_tensor_is_counted(name: str, shipped: Any) -> None:
    model = shipped(name)[0].value.model
    with torch.device("meta"):
        built = Counter(tuple(value.shape) for value in Decoder(model).parameters())
    planned: Counter[tuple[int, ...]] = Counter()
    for tensor in tensors(model):
        planned[tensor.shape] += tensor.number
    assert planned == built


@pytest.mark.parametrize("name", ["demo", "butterfly-8", "case-study-32b"])
def test_sizes_agree(name: str, shipped: Any) -> None:
    recipe = shipped(name)[0].value
    with torch.device("meta"):
        named = [(key, tuple(value.shape)) for key, value in Decoder(recipe.model).named_parameters()]
    made = fragment_map(named, recipe.exchange.fragments, recipe.exchange.chunk).fragments
    planned = fragment_sizes(recipe.model, recipe.exchange)
    assert sum(fragment.numel for fragment in made) == parameters(recipe.model).total
    assert [(f.numel, len(f.chunks), sum(c.numel for c in f.chunks if c.exact)) for f in made] == [
        (size.values, size.num_chunks, size.small) for size in planned
    ]
