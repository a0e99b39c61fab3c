"""``islandctl compare`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from islandctl.cli.compare import compare
from islandctl.errors import InfeasibleError, IslandError, UsageError

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/case-study-32b.yaml")


def run(*argv: str) -> tuple[str, IslandError | None]:
    app = typer.Typer()
    app.command()(compare)
    result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, argv)
    if result.exception is not None and not isinstance(result.exception, IslandError):
        raise result.exception
    return result.stdout, result.exception


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[str, str]:
    """The case study's two sites, with prices; the second can be bought."""
    paths = []
    for name, more in (
        ("us-b300", {"price": {"gpu": "6 USD/h", "egress": "0.02 USD/GB"}}),
        ("asia-gb300", {"price": {"gpu": "7 USD/h"}, "purchase": {"gpu": "60000 USD", "power_price": "0.1 USD/kWh"}}),
    ):
        data = yaml.safe_load((ROOT / f"site-profiles/{name}.yaml").read_text())
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data | more))
        paths.append(str(path))
    return paths[0], paths[1]


def test_two_sets_rented_and_owned(profiles: tuple[str, str]) -> None:
    us, asia = profiles
    output, error = run(RECIPE, "--sites", f"{us},{asia}", "--sites", asia, "--use", "10 %")
    assert error is None
    assert max(map(len, output.splitlines())) <= 100
    assert output.count("a purchase pays after") == 2
    told = json.loads(run(RECIPE, "--sites", f"{us},{asia}", "--sites", asia, "--json")[0])
    assert [way["way"] for way in told["ways"]] == ["rent", "own", "rent", "own"]
    assert told["seasonal_share"] == 0.25


def test_what_is_owned_already_is_not_called_a_purchase_that_never_pays(profiles: tuple[str, str]) -> None:
    _, asia = profiles
    output, error = run(RECIPE, "--sites", asia, "--set", "site.purchase.owned=160")
    assert error is None
    assert "all of it is owned already: cheaper than renting the same from" in output
    assert "never" not in output


def test_what_cannot_be_meant_ends_with_two(profiles: tuple[str, str]) -> None:
    for use in ("0 %", "110 %", "often"):
        _, error = run(RECIPE, "--sites", ",".join(profiles), "--use", use)
        assert isinstance(error, UsageError), use


def test_no_set_that_works_ends_with_three(profiles: tuple[str, str]) -> None:
    _, error = run(RECIPE, "--sites", ",".join(profiles), "--set", "site.gpu.memory=8 GB")
    assert isinstance(error, InfeasibleError)
    assert "memory of a rank" in error.message
