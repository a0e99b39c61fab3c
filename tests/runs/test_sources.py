"""A resume under another recipe, or a launch of a plan whose files have changed, is refused with the difference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from islandctl.config.load import load_recipe, load_site
from islandctl.config.recipe import Recipe
from islandctl.errors import UsageError
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from islandctl.runs.sources import check_files, check_recipe, differences, script_notes

from . import builders as make

ROOT = Path(__file__).parents[2]


def plan() -> Plan:
    return make.plan().model_copy(update={"sources": {"tiny.yaml": "hash"}})


def test_unchanged_says_nothing() -> None:
    assert check_recipe(plan(), lambda _: None, run="demo") == []


def test_a_decisive_change_is_refused_and_shown() -> None:
    changed = make.recipe(steps=200)
    with pytest.raises(UsageError, match=r"tiny\.yaml has changed .* training\.steps: 100 → 200") as caught:
        check_recipe(plan(), lambda _: changed, run="demo")
    assert caught.value.exit_code == 2
    assert "launch" in caught.value.hint


def test_other_changes_are_told_and_not_taken_up() -> None:
    data = make.recipe().model_dump(mode="json")
    data["checkpoint"]["every"] = 7
    notes = check_recipe(plan(), lambda _: Recipe.model_validate(data), run="demo")
    assert "checkpoint.every: 100 → 7" in notes[0]


def test_a_script_that_has_changed_is_told_and_not_taken_up() -> None:
    sources = {"/own/r.yaml": "h", "/own/train.py": "h", "/site.yaml": "h"}
    launched = make.plan().model_copy(update={"sources": sources, "files": {"train.py": "pass"}})
    assert script_notes(launched, ["/own/r.yaml", "/site.yaml"]) == []
    assert script_notes(launched, list(sources)) == ["/own/train.py has changed; the run keeps the one of its launch"]


def test_many_differences_are_cut() -> None:
    data = make.recipe().model_dump(mode="json")
    data["worker"]["env"] = {f"V{number}": "1" for number in range(20)}
    told = differences(make.recipe(), Recipe.model_validate(data))
    assert len(told) == 13
    assert told[-1] == "and 8 more"
    assert "absent → 1" in told[0]


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Path, Plan]:
    """The demo, planned with one setting changed from copies of its files."""
    for name in ("recipes/demo.yaml", "site-profiles/local-a.yaml", "site-profiles/local-b.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    sites = [load_site(tmp_path / f"local-{letter}.yaml") for letter in "ab"]
    return tmp_path, make_plan(load_recipe(tmp_path / "demo.yaml"), sites)


def test_a_plan_whose_files_say_something_else_is_refused(planned: tuple[Path, Plan]) -> None:
    folder, made = planned
    assert check_files(made) == []
    profile, recipe = folder / "local-b.yaml", folder / "demo.yaml"
    profile.write_text(profile.read_text() + "# a comment decides nothing\n")
    assert check_files(made) == []
    profile.write_text(profile.read_text().replace("rtt: 150 ms", "rtt: 90 ms"))
    recipe.write_text(recipe.read_text().replace("overlap: 5", "overlap: 6"))
    with pytest.raises(UsageError, match=r"wan\.rtt: 0\.15 s → 0\.09 s") as caught:
        check_files(made)
    assert "exchange.overlap: 5 → 6" in caught.value.message
    assert "--out" in caught.value.hint


def test_a_plan_without_its_files_can_be_launched(planned: tuple[Path, Plan]) -> None:
    folder, made = planned
    (folder / "local-a.yaml").unlink()
    (note,) = check_files(made)
    assert "local-a.yaml is not there any more" in note


def test_what_a_run_had_shown_is_no_change(planned: tuple[Path, Plan]) -> None:
    folder, made = planned
    first, second = made.sites
    seen = first.measured.model_copy(update={"step": 1.5, "source": "run demo-1"})
    made = made.model_copy(update={"sites": (first.model_copy(update={"measured": seen}), second)})
    profile = folder / "local-a.yaml"
    profile.write_text(profile.read_text() + "# changed\n")
    assert check_files(made) == []
