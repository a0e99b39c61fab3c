"""What inner optimizers keep, by hand."""

from __future__ import annotations

import pytest

from islandctl.config.recipe import ModelRecipe
from islandctl.planner.optimizer_state import state_bytes
from islandctl.planner.parameters import parameters

MODEL = ModelRecipe(
    kind="moe", layers=1, width=1536, heads=2, hidden=1000, experts=4, active_experts=1, vocabulary=256
)


def test_adamw_keeps_two_moments() -> None:
    assert state_bytes(MODEL, "adamw") == 8 * parameters(MODEL).total


def test_muon_keeps_one_moment_of_matrices() -> None:
    counts = parameters(MODEL)
    matrices = counts.attention + counts.experts
    assert state_bytes(MODEL, "muon") == 4 * matrices + 8 * (counts.total - matrices)


def test_shampoo_keeps_factors_and_roots_of_blocks() -> None:
    """1536 is cut into 1024 and 512; 1000 stays whole."""
    square = 8 * (2 * (1024**2 + 512**2)) * 2
    expert = 8 * ((1024**2 + 512**2) + 2 * 1000**2)
    assert state_bytes(MODEL, "shampoo") == state_bytes(MODEL, "adamw") + 4 * square + 12 * expert


def test_soap_keeps_a_factor_and_a_basis_a_side() -> None:
    attention = 4 * 8 * 2 * 1536**2
    experts = 3 * 8 * (4**2 + 1536**2 + 1000**2)
    assert state_bytes(MODEL, "soap") == state_bytes(MODEL, "adamw") + attention + experts


def test_sides_beyond_its_limit_have_no_factor_in_soap() -> None:
    wide = MODEL.model_copy(update={"hidden": 20_000})
    more = state_bytes(wide, "soap") - state_bytes(wide, "adamw")
    assert more == state_bytes(MODEL, "soap") - state_bytes(MODEL, "adamw") - 3 * 8 * 1000**2


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="no state known for optimizer lion"):
        state_bytes(MODEL, "lion")
