"""The text is looked at before any worker starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import islandctl
from islandctl.config.recipe import DataRecipe
from islandctl.errors import PreflightError
from islandctl.fleet.provision import Prepared
from islandctl.planner.plan import Plan
from islandctl.runs.reach import Reach
from islandctl.runs.text import check_text

from . import builders as make

CODE = str(Path(islandctl.__file__).parents[1])
HERE = Prepared(python=sys.executable, code=CODE, supervisor="", work_dir="/", home="/")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two sites with the same text in their homes; a shell line in the profile makes this machine either of them."""
    for name in make.CELLS:
        for number in range(9):
            path = tmp_path / name / "text" / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"line of file {number}\n" * 20)
    return tmp_path


def plan(root: Path, **data: object) -> Plan:
    made = make.plan()
    sites = [
        site.model_copy(
            update={
                "environment": site.environment.model_copy(
                    update={"setup": (f"echo hi; export HOME={root / site.name}",)}
                )
            }
        )
        for site in made.sites
    ]
    text = DataRecipe.model_validate({"paths": ["~/text"], "held_out": 0.3, **data})
    recipe = made.recipe.model_copy(update={"data": text})
    return made.model_copy(update={"recipe": recipe, "sites": tuple(sites)})


def check(given: Plan) -> list[str]:
    said: list[str] = []
    with Reach(given, "demo", said.append) as reach:
        check_text(given, {(name, ""): HERE for name in make.CELLS}, reach, said.append)
    return sorted(said)


def test_a_text_that_is_the_same_everywhere_is_told(texts: Path) -> None:
    assert check(plan(texts)) == [
        "east/local: its text is there: 9 files, 2.71 kB",
        "west/local: its text is there: 9 files, 2.71 kB",
    ]


def test_a_site_without_it_is_named(texts: Path) -> None:
    shutil.rmtree(texts / "west" / "text")
    with pytest.raises(PreflightError, match=r"^west/local: data.paths: '~/text' gives no file") as caught:
        check(plan(texts))
    assert "data.paths" in caught.value.hint


def test_too_little_of_it_names_the_limit(texts: Path) -> None:
    with pytest.raises(
        PreflightError, match=r"2 of 2 nodes: east/local: data.paths.*one sequence needs 26"
    ) as caught:
        check(plan(texts, limit_bytes="40 B"))
    assert "raise data.limit_bytes (it is 40)" in caught.value.hint


def test_another_held_out_text_is_found_before_it_is_trained_against(texts: Path) -> None:
    for path in (texts / "west" / "text").iterdir():
        path.write_text(path.read_text() + "one line more\n")
    with pytest.raises(PreflightError, match="the held-out text of west/local is not that of east/local"):
        check(plan(texts))


def test_a_node_that_cannot_say_anything_is_told_with_its_last_line(texts: Path) -> None:
    given = plan(texts)
    broken = given.sites[1].environment.model_copy(update={"setup": ("echo no module >&2; exit 3",)})
    sites = (given.sites[0], given.sites[1].model_copy(update={"environment": broken}))
    with pytest.raises(PreflightError, match="west/local: the text could not be read: no module"):
        check(given.model_copy(update={"sites": sites}))
