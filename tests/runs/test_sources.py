"""A resume under another recipe is refused, with the difference."""

from __future__ import annotations

import pytest

from islandctl.config.recipe import Recipe
from islandctl.errors import UsageError
from islandctl.planner.plan import Plan
from islandctl.runs.sources import check_recipe, differences, script_notes

from . import builders as make


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
