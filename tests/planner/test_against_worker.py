"""The planner's sizes are those of the worker's own model and fragment map."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from islandctl.config.placement import PlacementRule
from islandctl.exchange.fragments import fragment_map
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.parameters import parameters
from islandctl.worker.model import Decoder


@pytest.mark.parametrize("name", ["demo", "butterfly-8", "case-study-32b"])
@pytest.mark.parametrize("placement", ["strided", "consecutive", "balanced"])
def test_sizes_agree(name: str, placement: PlacementRule, shipped: Any) -> None:
    recipe = shipped(name)[0].value
    with torch.device("meta"):
        named = [(key, tuple(value.shape)) for key, value in Decoder(recipe.model).named_parameters()]
    exchange = recipe.exchange.model_copy(update={"placement": placement})
    made = fragment_map(
        named, exchange.fragments, exchange.chunk, placement=placement, codec=exchange.codec
    ).fragments
    planned = fragment_sizes(recipe.model, exchange)
    assert sum(fragment.numel for fragment in made) == parameters(recipe.model).total
    assert [(f.numel, len(f.chunks), sum(c.numel for c in f.chunks if c.exact)) for f in made] == [
        (size.values, size.num_chunks, size.small) for size in planned
    ]
