"""Counts, speed and utilisation, held against what others have published (``data/published_*.csv``)."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.recipe import ModelRecipe
from islandctl.planner.make import make_plan
from islandctl.planner.parameters import parameters
from tests.planner.published import rows

MODELS = {row["model"]: row for row in rows("published_models.csv")}
INTELLECT_1 = {"layers": 42, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256}


def shape(name: str) -> dict[str, Any]:
    if name == "intellect-1":
        return {"kind": "dense", **INTELLECT_1}
    sizes = {key: int(text) for key, text in MODELS[name].items() if text and key not in ("model", "parameters")}
    return {"kind": "moe" if "experts" in sizes else "dense", **sizes}


@pytest.mark.parametrize("name", MODELS)
def test_the_counts_of_released_models_are_exact(name: str) -> None:
    assert parameters(ModelRecipe(**shape(name))).total == int(MODELS[name]["parameters"])


@pytest.mark.parametrize("row", rows("published_training.csv"), ids=lambda row: row["model"])
def test_the_speed_range_covers_whole_trainings(row: dict[str, str], recipe: Any, site: Any) -> None:
    gpus, batch, sequence = int(row["gpus"]), int(row["batch"]), int(row["sequence"])
    training = {"steps": 1000, "batch": batch, "sequence": sequence, "precision": "bfloat16"}
    loaded = recipe(
        model=shape(row["model"]), training={**training, "optimizer": {"lr": 1e-3}}, exchange__mode="none"
    )
    profile = site(
        gpu={"type": row["gpu"], "count": gpus, "per_node": 8},
        hosts=[f"h{number}" for number in range(gpus // 8)],
        network={"bandwidth": f"{row['gbit_per_gpu']} Gbit/s"},
    )
    (estimate,) = make_plan(loaded, [profile]).estimates
    assert estimate.step is not None
    was = batch * sequence / gpus / float(row["tokens_per_second_per_gpu"])
    assert estimate.step.low <= was <= estimate.step.high
    assert estimate.step.value == pytest.approx(was, rel=0.05 if row["gpu"].startswith("H100") else 0.2)


@pytest.mark.parametrize(("all_reduce_s", "share"), [(103, 0.957), (382, 0.856), (469, 0.83)])
def test_the_utilisation_of_an_exchange_that_nothing_hides(
    all_reduce_s: int, share: float, recipe: Any, site: Any
) -> None:
    """INTELLECT-1 (arXiv 2412.01152, table 3): in the USA, with Europe, over three continents."""
    loaded = recipe(exchange={"window": 100, "fragments": 1, "overlap": 0}, training__steps=10_000)
    measured = {"measured__step": "22.8 s", "measured__exchange": f"{all_reduce_s} s"}
    plan = make_plan(loaded, [site(name, **measured) for name in "ab"])
    assert plan.totals.computing is not None
    assert plan.totals.computing.value == pytest.approx(share, abs=0.005)
