"""The plan of a script: complete for launch, and honest about what it cannot know."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.cli.plan import as_loaded
from islandctl.config.load import load_recipe, load_site
from islandctl.errors import UsageError
from islandctl.planner.change import Case
from islandctl.planner.file import changed_sources, load_plan, plan_text
from islandctl.planner.from_run import Shown
from islandctl.planner.make import compare_plans, make_plan, simulate_plan
from islandctl.planner.measured import CellShown
from islandctl.planner.plan import Plan, config_hash

ROOT = Path(__file__).parents[2]
SITES = [ROOT / "site-profiles" / name for name in ("local-a.yaml", "local-b.yaml")]
RECIPE = """
name: own
training: {steps: 5, batch: 2, sequence: 8}
exchange: {window: 10, codec: bf16}
relay: {emulate: {bandwidth: 8 Mbit/s, rtt: 10 ms}}
worker:
  command: [python, x.py]
  files: [x.py]
"""


def made(folder: Path, more: str = "", script: str = "print()\n") -> Plan:
    (folder / "x.py").write_text(script)
    (folder / "r.yaml").write_text(RECIPE + more)
    return make_plan(load_recipe(folder / "r.yaml"), [load_site(path) for path in SITES])


def test_it_holds_the_script_and_knows_what_the_links_carry(tmp_path: Path) -> None:
    plan = made(tmp_path, "  parameters: 1000000\n")
    assert (plan.feasible, plan.files, plan.parameters_total) == (True, {"x.py": "print()\n"}, 1_000_000)
    assert len(plan.cells) == 2
    texts = [finding.text for finding in plan.findings]
    assert "a script trains: what it needs of memory and time is not known to the plan" in texts
    assert any("sends about 2 MB and fetches 2 MB: 2 s of the link" in text for text in texts), texts
    saved = tmp_path / "a.plan"
    saved.write_text(plan_text(plan))
    assert load_plan(saved) == plan
    (tmp_path / "x.py").write_text("pass\n")
    assert changed_sources(plan) == [str(tmp_path / "x.py")]


def test_a_step_time_that_the_profiles_tell_is_used(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print()\n")
    paced = RECIPE.replace("window: 10", "window: 50, pace: measured").replace("steps: 5,", "steps: 50,")
    (tmp_path / "r.yaml").write_text(paced + "  parameters: 1000000\ncheckpoint: {every: 50}\n")
    for path, step in zip(SITES, ("50 ms", "100 ms"), strict=True):
        (tmp_path / path.name).write_text(path.read_text() + f"\nmeasured: {{step: {step}}}\n")
    plan = make_plan(load_recipe(tmp_path / "r.yaml"), [load_site(tmp_path / path.name) for path in SITES])
    told = {finding.place: finding.text for finding in plan.findings if "of its own" in finding.text}
    assert told == {
        "local-a": "71 steps of its own a window, 3.55 s",
        "local-b": "35 steps of its own a window, 3.5 s",
    }
    assert any("2 s of the link, in 3.55 s of training" in finding.text for finding in plan.findings)


def test_without_their_number_nothing_is_guessed(tmp_path: Path) -> None:
    plan = made(tmp_path)
    assert plan.parameters_total is None
    assert any(finding.hint == "set worker.parameters" for finding in plan.findings)


def test_another_script_is_another_configuration(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path, script="pass\n")
    assert first.config_hash != second.config_hash
    assert config_hash(first.recipe, first.cells, first.files) == first.config_hash


@pytest.mark.parametrize(("budget", "feasible"), [("{hours: 2 h}", True), ("{cost: 5 USD}", False)])
def test_a_budget_in_time_can_be_kept_and_one_in_money_needs_a_price(
    tmp_path: Path, budget: str, feasible: bool
) -> None:
    assert made(tmp_path, f"budget: {budget}\n").feasible == feasible


def test_what_a_script_needs_cannot_be_played_or_compared(tmp_path: Path) -> None:
    plan = made(tmp_path)
    case = Case(load_recipe(tmp_path / "r.yaml"), [load_site(path) for path in SITES])
    with pytest.raises(UsageError, match="a script's figures are not known"):
        simulate_plan(case, 0)
    with pytest.raises(UsageError, match="a script's figures are not known"):
        compare_plans([case], 0.5)
    run = Shown(run="r1", plan=plan, cells=tuple(CellShown(cell=cell.name, step_s=0.5) for cell in plan.cells))
    steps = [one for one in run.comparisons() if one.name == "step"]
    assert [(one.planned, one.measured, one.within) for one in steps] == [(None, 0.5, None)] * 2
    recipe, sites = as_loaded(plan)
    assert make_plan(recipe, sites, run) == plan
