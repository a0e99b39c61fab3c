"""What is examined: the recipe's run, or one site of it."""

from __future__ import annotations

from pathlib import Path

from islandctl.config.load import load_recipe, load_site
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from islandctl.runs.doctor.examine import for_one

ROOT = Path(__file__).parents[3]


def test_one_site_of_several_is_examined_by_itself() -> None:
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    first, second = (load_site(ROOT / "site-profiles" / f"local-{name}.yaml") for name in "ab")
    assert for_one(recipe, [first, second]) is recipe
    plan = make_plan(for_one(recipe, [first]), [first])
    assert [cell.site for cell in plan.cells] == [first.value.name]
    assert plan.recipe.relay == recipe.value.relay
    assert Plan.model_validate_json(plan.model_dump_json()) == plan  # as `stop` reads it when doctor was killed
