"""``islandctl plan`` and ``islandctl schema`` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import typer
import yaml
from typer.testing import CliRunner

from islandctl.cli.plan import plan
from islandctl.cli.plan_view import show
from islandctl.cli.schema import schema
from islandctl.errors import ConfigError, InfeasibleError, IslandError, UsageError
from islandctl.planner.file import load_plan
from islandctl.planner.plan import Finding
from tests.runs import builders as make

ROOT = Path(__file__).parents[2]
DEMO = [f"{ROOT}/recipes/demo.yaml", "--site", f"{ROOT}/site-profiles/local-a.yaml"]
DEMO += ["--site", f"{ROOT}/site-profiles/local-b.yaml"]
CASE = [f"{ROOT}/recipes/case-study-32b.yaml", "--site", f"{ROOT}/site-profiles/us-b300.yaml"]
CASE += ["--site", f"{ROOT}/site-profiles/asia-gb300.yaml"]


FOREIGN = [f"{ROOT}/recipes/foreign/recipe.yaml", *DEMO[1:]]


def run(*argv: str) -> tuple[str, IslandError | None]:
    """Standard output, and the error that the main program would report."""
    app = typer.Typer()
    app.command()(plan)
    app.command()(schema)
    result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, argv)
    if result.exception is not None and not isinstance(result.exception, IslandError):
        raise result.exception
    return result.stdout, result.exception


@pytest.mark.parametrize("argv", [DEMO, CASE], ids=["demo", "case-study"])
def test_the_table_stays_within_a_hundred_columns(argv: list[str]) -> None:
    output, _ = run("plan", *argv)
    lines = output.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 100
    assert "\x1b" not in output
    assert lines[-1].startswith("feasible")


def test_of_a_script_it_shows_who_runs_where_and_what_it_cannot_know() -> None:
    output, error = run("plan", *FOREIGN)
    assert error is None
    assert output.startswith("foreign  python train.py --lr 3e-3, 134 k parameters; 400 steps")
    assert "! worker.command: a script trains: what it needs of memory and time is not known to the plan" in output
    assert "memory a rank" not in output
    assert run("plan", *FOREIGN, "--explain")[1] is None
    _, error = run("plan", *FOREIGN, "--sweep", "exchange.window=10..40")
    assert isinstance(error, UsageError)
    assert "a script's figures are not known" in error.message


def test_the_case_study_shows_its_share_of_the_link() -> None:
    output, _ = run("plan", *CASE)
    row = next(line for line in output.splitlines() if line.startswith("us-b300  ") and "GiB" in line)
    assert "32.3 GB  32.3 GB" in row
    assert 30 <= int(row.split()[-1].rstrip("%")) <= 80
    assert "25 Gbit/s (3.12 GB/s)" in output


def test_uneven_cells_are_refused_at_their_place_with_the_nearest_numbers(tmp_path: Path) -> None:
    text = (ROOT / "recipes/butterfly-8.yaml").read_text()
    recipe = tmp_path / "uneven.yaml"
    recipe.write_text(text.replace("cells: 8 ", "cells: 6 "))
    line = next(number for number, one in enumerate(text.splitlines(), start=1) if "cells: 8 " in one)
    _, error = run("plan", str(recipe), "--site", str(ROOT / "site-profiles/butterfly-gb300.yaml"))
    assert isinstance(error, ConfigError)
    assert f"uneven.yaml:{line}:" in error.message
    assert "mode butterfly pairs 2, 4, 8, … cells, not 6; nearest: 4 or 8" in error.message


def test_the_last_line_is_the_next_command() -> None:
    output, _ = run("plan", *DEMO)
    assert output.splitlines()[-1] == "feasible  next: islandctl launch " + " ".join(DEMO)
    output, _ = run("plan", *DEMO, "--set", "exchange.overlap=8")  # which the files do not say
    assert output.splitlines()[-1] == "feasible  next: --out FILE saves it for islandctl launch"


def test_what_is_fine_here_and_a_warning_there_has_one_mark(capsys: pytest.CaptureFixture[str]) -> None:
    text = "no price known: the cost is left out"
    levels: tuple[tuple[Literal["ok", "warn"], str], ...] = (("ok", "here"), ("warn", "there"))
    findings = tuple(Finding(level=level, place=f"site {place}", text=text) for level, place in levels)
    show(make.plan().model_copy(update={"findings": findings}), command="islandctl launch run.plan")
    said = [line for line in capsys.readouterr().out.splitlines() if text in line]
    assert said == [f"! site there: {text}"]


def test_json_is_the_plan(tmp_path: Path) -> None:
    output, error = run("plan", *DEMO, "--json", "--out", str(tmp_path / "run.plan"))
    assert error is None
    data = json.loads(output)
    assert data["feasible"] is True
    assert data == load_plan(tmp_path / "run.plan").model_dump(mode="json")


def test_out_saves_a_plan_and_replaces_only_plans(tmp_path: Path) -> None:
    target = tmp_path / "run.plan"
    for _ in range(2):
        output, error = run("plan", *DEMO, "--out", str(target))
        assert error is None
        assert output.splitlines()[-1] == f"feasible  next: islandctl launch {target}"
    assert [path.name for path in tmp_path.iterdir()] == ["run.plan"]
    target.write_text("name: my recipe")
    _, error = run("plan", *DEMO, "--out", str(target))
    assert isinstance(error, UsageError)
    assert target.read_text() == "name: my recipe"
    _, error = run("plan", *DEMO, "--out", str(tmp_path / "none" / "run.plan"))
    assert isinstance(error, UsageError)


def test_an_infeasible_plan_is_shown_saved_and_ends_with_three(tmp_path: Path) -> None:
    data = yaml.safe_load((ROOT / "site-profiles/local-a.yaml").read_text())
    data["cpu"]["memory"] = "64 MiB"
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(data))
    argv = [DEMO[0], "--site", str(small), *DEMO[3:]]
    output, error = run("plan", *argv, "--out", str(tmp_path / "run.plan"))
    assert isinstance(error, InfeasibleError)
    assert error.exit_code == 3
    assert "memory of a rank" in error.message
    assert "infeasible" in output
    assert not load_plan(tmp_path / "run.plan").feasible
    output, error = run("plan", *argv, "--json")
    assert isinstance(error, InfeasibleError)
    assert json.loads(output)["feasible"] is False


def test_wrong_files_end_with_two(tmp_path: Path) -> None:
    _, error = run("plan", str(tmp_path / "none.yaml"), *DEMO[1:])
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    _, error = run("plan", *DEMO[:3], *DEMO[1:3])
    assert isinstance(error, ConfigError)
    assert "site name 'local-a' is taken by" in error.message


def test_a_plan_is_not_planned_again(tmp_path: Path) -> None:
    path = str(tmp_path / "run.plan")
    assert run("plan", *DEMO, "--out", path)[1] is None
    _, error = run("plan", path, *DEMO[1:])
    assert isinstance(error, UsageError)
    assert (error.message, error.hint) == (f"{path}: is a plan already", f"islandctl launch {path}")


@pytest.mark.parametrize("kind", ["site", "recipe"])
def test_schema_prints_json(kind: str) -> None:
    output, error = run("schema", kind)
    assert error is None
    assert json.loads(output)["type"] == "object"


def test_the_command_modules_load_nothing_heavy() -> None:
    heavy = "('pydantic', 'yaml', 'rich.table', 'torch')"
    code = f"import sys, islandctl.cli.plan, islandctl.cli.schema; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_or_a_recipe_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path))
    _, error = run("plan")
    assert isinstance(error, UsageError)
    assert (error.message, error.hint) == ("missing argument RECIPE", "islandctl plan --help")
    _, error = run("plan", "--from-run", "none")
    assert isinstance(error, UsageError)
    assert error.message == "there is no run called none"


def test_a_simulation_is_shown_and_played_again_from_its_seed() -> None:
    argv = ("plan", *CASE, "--set", "training.steps=5000", "--simulate", "--seed", "7")
    output, error = run(*argv)
    assert error is None
    assert "2 cells, 100 windows, played 20 times from seed 7" in output
    assert max(map(len, output.splitlines())) <= 100
    first, again = (json.loads(run(*argv, "--json")[0]) for _ in range(2))
    assert first == again
    assert first["runs"] == 20
    _, error = run("plan", *DEMO, "--seed", "1")
    assert isinstance(error, UsageError)
    _, error = run("plan", *CASE, "--simulate", "--explain")
    assert isinstance(error, UsageError)
