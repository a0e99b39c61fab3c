"""Memory and speed, held against measured training runs (``data/training_measurements.csv``)."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.recipe import Recipe
from islandctl.planner import memory, speed
from islandctl.planner.catalogue import accelerator
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.layout import Layout
from islandctl.planner.make import make_plan
from islandctl.planner.parameters import parameters
from tests.planner.published import rows

ROWS = rows("training_measurements.csv")
LLAMA_8B = {
    "kind": "dense",
    "layers": 32,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14336,
    "vocabulary": 128256,
}


def measured(row: dict[str, str], recipe: Any, site: Any) -> tuple[Any, Any]:
    """The row's recipe, and its machines: H100 with 96 GB at 2.4 TB/s, 400 Gbit/s a GPU."""
    gpus = int(row["gpus"])
    training = {
        "steps": 1000,
        "batch": gpus * int(row["local_batch"]),
        "sequence": int(row["sequence"]),
        "precision": "bfloat16",
        "recompute": "selective",
        "optimizer": {"lr": 1e-3},
    }
    loaded = recipe(model=LLAMA_8B, training=training, exchange__mode="none")
    hosts = [f"h{number}" for number in range(gpus // 8)]
    gpu = {"type": "H100-SXM", "count": gpus, "per_node": 8, "memory": "96 GB", "memory_rate": "2.4 TB/s"}
    return loaded, site(gpu=gpu, hosts=hosts)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['gpus']}-{row['techniques']}")
def test_memory_within_fifteen_percent(row: dict[str, str], recipe: Any, site: Any) -> None:
    loaded, profile = measured(row, recipe, site)
    need = make_plan(loaded, [profile]).estimates[0].memory_per_rank
    was = float(row["memory_gib_per_gpu"]) * 2**30
    assert need.value == pytest.approx(was, rel=0.15)
    assert need.low <= was <= need.high


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['gpus']}-{row['techniques']}")
def test_the_speed_range_covers_what_was_measured(row: dict[str, str], recipe: Any, site: Any) -> None:
    loaded, profile = measured(row, recipe, site)
    plan = make_plan(loaded, [profile])
    counts, (cell,) = parameters(loaded.value.model), plan.cells
    step = speed.step_time(
        loaded.value, counts, profile.value, accelerator(profile), cell, fp8="float8" in row["techniques"]
    )
    assert step is not None
    tokens = int(row["local_batch"]) * int(row["sequence"])
    assert tokens / step.high <= float(row["tokens_per_second_per_gpu"]) <= tokens / step.low
    assert step.high / step.low <= 1.6


def test_the_reported_utilisation(recipe: Any, site: Any) -> None:
    """33 % without and 39 % with torch.compile lie in the planned range."""
    loaded, profile = measured(ROWS[0], recipe, site)
    share = make_plan(loaded, [profile]).estimates[0].utilisation
    assert share is not None
    assert share.low < 0.33 < 0.39 < share.high


def test_recomputing_more_keeps_less(recipe: Any, site: Any) -> None:
    loaded, _ = measured(ROWS[0], recipe, site)
    kept, work = [], []
    for how in ("none", "selective", "full"):
        one = loaded.value.model_copy(
            update={"training": loaded.value.training.model_copy(update={"recompute": how})}
        )
        kept.append(memory.activation_bytes(one, Layout(fsdp=8)))
        work.append(speed.step_work(one, parameters(one.model)).recomputed_flops)
    assert kept[0] > kept[1] > kept[2]
    assert 0 == work[0] < work[1] < work[2]


def test_layouts_divide_what_they_say(recipe: Any, site: Any) -> None:
    loaded, _ = measured(ROWS[3], recipe, site)
    value: Recipe = loaded.value
    sizes, counts = fragment_sizes(value.model, value.exchange), parameters(value.model)

    def parts(**ways: int) -> memory.RankMemory:
        return memory.rank_parts(value, counts, sizes, Layout(**ways), on_cpu=False)

    plain, tensor, stages = parts(fsdp=128), parts(fsdp=16, tensor=8), parts(fsdp=64, pipeline=2)
    assert plain.weights == tensor.weights == stages.weights
    assert tensor.gathered == plain.gathered // 8
    assert tensor.activations == plain.activations  # eight times the sequences, an eighth of each
    assert stages.activations < 2 * plain.activations
