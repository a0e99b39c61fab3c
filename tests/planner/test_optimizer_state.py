"""What inner optimizers keep, by hand and against the worker's own."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from islandctl.config.recipe import ModelRecipe, Optimizer
from islandctl.planner.optimizer_state import cell_bytes, rank_bytes
from islandctl.planner.parameters import parameters
from islandctl.worker.model import Decoder
from islandctl.worker.optimizer import InnerOptimizer

MODEL = ModelRecipe(
    kind="moe", layers=1, width=1536, heads=2, hidden=1000, experts=4, active_experts=1, vocabulary=256
)
Kind = Literal["adamw", "shampoo", "soap", "muon"]


def optimizer(kind: Kind = "adamw", **keys: Any) -> Optimizer:
    return Optimizer(kind=kind, lr=1e-3, **keys)


def over_adamw(kind: Kind, num_ranks: int = 1, **keys: Any) -> int:
    return rank_bytes(MODEL, optimizer(kind, **keys), num_ranks) - rank_bytes(MODEL, optimizer(), num_ranks)


def test_adamw_keeps_two_moments() -> None:
    assert rank_bytes(MODEL, optimizer(), 1) == cell_bytes(MODEL, optimizer(), 7) == 8 * parameters(MODEL).total


def test_muon_keeps_one_moment_of_matrices() -> None:
    counts = parameters(MODEL)
    assert over_adamw("muon") == -4 * (counts.attention + counts.experts)


def test_shampoo_keeps_factors_and_roots_of_blocks() -> None:
    """1536 is cut into 1024 and 512; 1000 stays whole."""
    square = 8 * 2 * 2 * (1024**2 + 512**2)
    expert = 8 * ((1024**2 + 512**2) + 2 * 1000**2)
    assert over_adamw("shampoo") == 4 * square + 12 * expert


def test_small_blocks_save_where_ranks_have_few_rows() -> None:
    assert over_adamw("shampoo", 64, block=32) < 0.7 * over_adamw("shampoo", 64)


def test_soap_keeps_a_covariance_and_a_basis_a_side() -> None:
    assert over_adamw("soap") == 4 * 8 * 2 * 1536**2 + 12 * 8 * (1536**2 + 1000**2)


def test_ranks_precondition_their_own_rows_and_experts() -> None:
    """Of two ranks each has 768 rows of a square matrix, all its columns, and two of the four experts."""
    square, expert = 8 * (768**2 + 1536**2), 8 * (1536**2 + 1000**2)
    assert over_adamw("soap", 2) == 4 * square + 6 * expert
    both = cell_bytes(MODEL, optimizer("soap"), 2) - cell_bytes(MODEL, optimizer(), 2)
    assert both == 2 * over_adamw("soap", 2)


def test_sides_beyond_its_limit_have_no_factor_in_soap() -> None:
    wide = MODEL.model_copy(update={"hidden": 20_000})
    more = rank_bytes(wide, optimizer("soap"), 1) - rank_bytes(wide, optimizer(), 1)
    assert more == over_adamw("soap") - 12 * 8 * 1000**2


@pytest.mark.parametrize("kind", ["adamw", "shampoo", "soap", "muon"])
def test_the_worker_keeps_as_much(kind: Kind, shipped: Any) -> None:
    if kind == "soap":
        pytest.importorskip("pytorch_optimizer", reason="the extra `soap` is not installed")
    recipe = shipped("demo")[0].value
    training = recipe.training.model_copy(update={"optimizer": optimizer(kind)})
    inner = InnerOptimizer(dict(Decoder(recipe.decoder).named_parameters()), training)
    kept = sum(tensor.numel() * 4 for name, tensor in inner.tensors().items() if tensor.ndim and "step" not in name)
    assert kept == rank_bytes(recipe.decoder, training.optimizer, 1)
    assert torch.float32 in {tensor.dtype for tensor in inner.tensors().values()}
