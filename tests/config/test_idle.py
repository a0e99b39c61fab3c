"""A key that decides nothing beside what else is chosen is told at its place, whatever its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.config.load import load_recipe, load_site
from islandctl.config.recipe import Recipe
from islandctl.errors import ConfigError

MODEL = "model: {kind: dense, layers: 2, width: 16, heads: 2, hidden: 32}"
TRAINING = "training: {steps: 10, batch: 2, sequence: 8, optimizer: {lr: 1e-3}}"
RECIPE = f"name: r\n{MODEL}\ndata: {{paths: [python-stdlib]}}\n{TRAINING}\n"
SITE = (
    "name: s\nscheduler: local\ngpu: {type: cpu, count: 1, per_node: 1}\n"
    "wan: {up: 1 Gbit/s, down: 1 Gbit/s, rtt: 1 ms}\ncpu: {cores: 1, memory: 1 GiB}\n"
)


def faults(tmp_path: Path, text: str, load: object = load_recipe) -> list[str]:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)  # type: ignore[operator]
    return caught.value.message.replace(f"{tmp_path}/", "").splitlines()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "name: r",
            "exchange: {alpha: 0.5}\nname: r",
            ["f.yaml:1:19: exchange.alpha: means nothing with apply: carry"],
        ),
        (
            "name: r",
            "name: r\nexchange: {mode: butterfly, outer: {lr: 0.7}, apply: carry, alpha: 0.1}",
            [
                "exchange.outer: means nothing with mode: butterfly: it has no anchor to move",
                "exchange.alpha: means nothing with apply: carry",
            ],
        ),
        (
            "name: r",
            "name: r\nexchange: {mode: none, window: 50, late: {then: alone}}",
            ["exchange.window: means nothing with mode: none", "exchange.late: means nothing with mode: none"],
        ),
        (
            "name: r",
            "name: r\nexchange: {codec: fp32, feedback: 1, exact: ['*.head']}",
            ["exchange.feedback: means nothing with codec: fp32", "exchange.exact: means nothing with codec: fp32"],
        ),
        (
            "optimizer: {lr: 1e-3}",
            "optimizer: {kind: muon, lr: 1e-3, block: 64, refresh: 5, momentum: 0.9}",
            [
                "optimizer.block: means nothing with kind: muon, only with shampoo;",
                "optimizer.refresh: means nothing",
            ],
        ),
        ("hidden: 32", "hidden: 32, balance: 0.01", ["model.balance: means nothing with kind: dense"]),
        (
            "optimizer: {lr",
            "schedule: {decay: none, final: 0.1}, optimizer: {lr",
            ["training.schedule.final: means nothing with decay: none"],
        ),
        (
            "name: r",
            "name: r\nworker: {restart: {limit: 0, backoff: 2 s}}",
            ["worker.restart.backoff: means nothing with limit: 0"],
        ),
    ],
)
def test_an_idle_key_is_told_at_its_place(tmp_path: Path, old: str, new: str, told: list[str]) -> None:
    assert old in RECIPE
    found = faults(tmp_path, RECIPE.replace(old, new))
    assert len(found) == len(told)
    for line, expected in zip(found, told, strict=True):
        assert expected in line
        assert line.endswith("leave it out")


def test_half_a_model_beside_a_script_is_one_fault(tmp_path: Path) -> None:
    text = (
        "name: r\nmodel: {kind: dense}\ntraining: {steps: 9, batch: 2, sequence: 8}\nworker: {command: python -m x}"
    )
    told = "f.yaml:2:8: model: means nothing with worker.command: the script decides it; leave it out"
    assert faults(tmp_path, text) == [told]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("ssh: {port: 22}", "f.yaml:6:6: ssh: means nothing with scheduler: local"),
        ("environment: {build: false, packages: [x]}", "environment.packages: means nothing with build: false"),
    ],
)
def test_an_idle_key_of_a_profile(tmp_path: Path, more: str, told: str) -> None:
    (line,) = faults(tmp_path, SITE + more, load_site)
    assert told in line


def test_what_is_read_back_with_all_its_defaults_is_not_idle(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE + "exchange: {mode: butterfly}\n")
    recipe = load_recipe(path).value
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_blend_that_keeps_its_own_value_whole_exchanges_nothing(tmp_path: Path) -> None:
    (told,) = faults(tmp_path, f"exchange: {{apply: blend, alpha: 100 %}}\n{RECIPE}")
    assert told.startswith("f.yaml:1:33: exchange.alpha: alpha 1 keeps the cell's own value whole")
