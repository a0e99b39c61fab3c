"""Saved plans: exact round trips, and damage that is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from islandctl.errors import ConfigError
from islandctl.planner.file import changed_sources, load_plan, looks_like_plan, plan_text
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan

CASES = [
    ("demo", "local-a", "local-b"),
    ("case-study-32b", "us-b300", "asia-gb300"),
    ("butterfly-8", "butterfly-gb300"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_round_trip(case: tuple[str, ...], shipped: Any, tmp_path: Path) -> None:
    plan = make_plan(*shipped(*case))
    path = tmp_path / "run.plan"
    path.write_text(plan_text(plan))
    loaded = load_plan(path)
    assert loaded == plan
    assert loaded.plan_hash == plan.plan_hash
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert looks_like_plan(path)
    assert changed_sources(loaded) == []


def test_config_hash_covers_what_decides_the_weights(recipe: Any, site: Any) -> None:
    def hash_of(names: tuple[str, ...] = ("a", "b"), **changes: Any) -> str:
        return make_plan(recipe(**changes), [site(name) for name in names]).config_hash

    assert hash_of() == hash_of(checkpoint__every=7)
    assert len({hash_of(), hash_of(("b", "a")), hash_of(exchange__window=49), hash_of(training__seed=1)}) == 4


def test_changed_and_lost_sources(recipe: Any, site: Any, tmp_path: Path) -> None:
    plan = make_plan(recipe(), [site("a"), site("b")])
    assert sorted(plan.sources) == [str(tmp_path / name) for name in ("a.yaml", "b.yaml", "recipe.yaml")]
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "recipe.yaml").write_text("name: other")
    assert sorted(changed_sources(plan)) == [str(tmp_path / "a.yaml"), str(tmp_path / "recipe.yaml")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "not a plan, or damaged"),
        (lambda text: "name: demo", "not a plan, or damaged"),
        (lambda text: "[" * 100_000, "not a plan, or damaged"),
        (lambda text: text[: len(text) // 2], "not a plan, or damaged"),
        (lambda text: text.replace('"steps": 100,', '"steps": 101,'), "was changed after it was saved"),
        (lambda text: text.replace('"steps": 100,', '"steps": "x",'), "damaged plan: recipe.training.steps"),
        (lambda text: text.replace('"version": 2,', '"version": 3,'), "a plan of version 3"),
        (lambda text: json.dumps({"plan": [], "plan_hash": ""}), "not a plan, or damaged"),
    ],
)
def test_damage_is_noticed(damage: Any, message: str, recipe: Any, site: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.plan"
    text = plan_text(make_plan(recipe(), [site("a"), site("b")]))
    path.write_text(damage(text))
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "islandctl plan" in caught.value.hint


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_plan(tmp_path / "none.plan")
    assert not looks_like_plan(tmp_path / "none.plan")


def test_a_recipe_written_as_json_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"name": "demo", "training": {"steps": 100}}, indent=1))
    assert not looks_like_plan(path)
