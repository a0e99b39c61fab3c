"""From kept results to the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.experiments.equal_compute_lib import main as command
from scripts.experiments.equal_compute_lib.arms import ARMS, Arm, changed, other
from scripts.experiments.equal_compute_lib.cache import Cache
from scripts.experiments.equal_compute_lib.report import figure, ratio, row_of
from scripts.experiments.equal_compute_lib.settings import Anchored, Run
from scripts.experiments.equal_compute_lib.table import write

BASE = Arm("base", "ordinary", Run(), rates=(0.1, 0.2), seeds=(0, 1, 2))
CELLS = Arm("cells", "two cells", Run(cells=2, exchange=Anchored(kind="anchor")), "base", rates=(0.1,), seeds=(0, 1))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "equal_compute")
    for arm, rate, numbers in ((BASE, 0.1, [2.0, 3.0, 4.0]), (BASE, 0.2, [2.5]), (CELLS, 0.1, [1.0, 3.0])):
        for run, number in zip(arm.runs(rate), numbers, strict=False):
            cache.put(run, {"bits_per_byte": number, "bytes_up_per_cell": 1e6, "bytes_joint_per_cell": 0.0})
    return cache


def test_figures() -> None:
    assert (figure([2.0]).mean, figure([2.0]).error) == (2.0, None)
    assert figure([1.0, 2.0, 3.0]).error == pytest.approx(3**-0.5)
    assert str(figure([1.0, 2.0, 3.0])) == "2.0000 ± 0.5774"


def test_the_best_rate_is_chosen_by_the_first_seed(cache: Cache) -> None:
    row = row_of(BASE, cache)
    assert row is not None
    assert (row.rate, sorted(row.results), row.bits_per_byte.mean) == (0.1, [0, 1, 2], 3.0)
    assert {rate: one.count for rate, one in row.by_rate.items()} == {0.1: 3, 0.2: 1}
    assert row.is_whole
    assert row_of(Arm("other", "", Run(steps=7)), cache) is None


def test_a_row_is_whole_when_the_rates_beside_and_all_seeds_are_there(cache: Cache) -> None:
    for change in ({"rates": (0.05, 0.1, 0.2)}, {"seeds": (0, 1, 2, 3)}):
        row = row_of(replace(BASE, **change), cache)
        assert row is not None
        assert not row.is_whole


def test_ratios_are_taken_by_seed(cache: Cache) -> None:
    base, cells = row_of(BASE, cache), row_of(CELLS, cache)
    assert base is not None
    assert cells is not None
    found = ratio(cells, base)
    assert found is not None
    assert (found.mean, found.count) == ((0.5 + 1.0) / 2, 2)


def test_the_page_keeps_its_words_around_the_table(cache: Cache, tmp_path: Path) -> None:
    page = tmp_path / "equal_compute.md"
    page.write_text("Before.\n<!-- table -->\nold\n<!-- /table -->\nAfter.\n")
    for _ in range(2):
        write((BASE, CELLS, Arm("later", "a later one", Run(steps=7), "base")), cache, tmp_path)
    text = page.read_text()
    assert text.startswith("Before.\n<!-- table -->\n| arm")
    assert text.endswith("<!-- /table -->\nAfter.\n")
    assert "old" not in text
    assert "| two cells | 2.0000 ± 1.0000 | base | 0.7500 ± 0.2500 | 0.1 |" in text
    assert "| a later one | not trained yet | base | | | | `later` |" in text
    figures = json.loads((tmp_path / "equal_compute.json").read_text())
    assert figures["arms"]["cells"]["ratio"] == {"mean": 0.75, "standard_error": 0.25, "seeds": 2}
    assert figures["two_site_ratio"] is None
    assert figures["not_trained_yet"] == ["later"]
    assert (tmp_path / "equal_compute.png").read_bytes()[:4] == b"\x89PNG"


def test_every_arm_is_measured_by_one_of_equal_compute() -> None:
    arms = {arm.name: arm for arm in ARMS}
    assert len(arms) == len(ARMS)
    for arm in ARMS:
        if arm.against is not None:
            base = arms[arm.against].run
            assert base.exchange is None
            equal = {"batch": base.batch, "inner__betas": base.inner.betas}
            assert changed(arm.run, exchange=None, cells=1, joint=0, alone=False, **equal) == base
            is_equal = arm.run.batch == base.batch and arm.run.inner.betas == base.inner.betas
            assert is_equal or arm.run.exchange is None


def test_other_text_and_seeds() -> None:
    arm = other(BASE, "/texts", (7, 8))
    assert [(run.seed, run.text) for run in arm.runs(0.1)] == [(7, "/texts"), (8, "/texts")]
    assert other(BASE, None, None) == BASE


def test_the_command_tries_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = [
        "model.layers=1",
        "model.width=8",
        "model.heads=1",
        "model.sequence=8",
        "steps=2",
        "batch=2",
        "held_out=2",
    ]
    arguments = ["--results", str(tmp_path), "try", *tiny, "inner.kind=shampoo"]
    assert command.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["inner"] == {"kind": "shampoo"}
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert command.main(["--results", str(tmp_path), "kept"]) == 0
    figure, *settings = capsys.readouterr().out.split()
    assert figure == f"{told['result']['bits_per_byte']:.4f}"
    assert command.parse(settings).told() == told["settings"]


def test_the_table_of_ones_own_seeds_and_text_can_be_written_again(tmp_path: Path) -> None:
    own = ["--seeds", "7,8", "--text", "/texts"]
    arm = other(ARMS[0], "/texts", (7, 8))
    for run in arm.runs(arm.rates[0]):
        Cache(tmp_path / "equal_compute").put(
            run, {"bits_per_byte": 2.5, "bytes_up_per_cell": 0.0, "bytes_joint_per_cell": 0.0}
        )
    told = {}
    for words in ([], own):
        assert command.main(["--results", str(tmp_path), "table", *words]) == 0
        told[len(words)] = json.loads((tmp_path / "equal_compute.json").read_text())["arms"]
    assert told[0] == {}
    assert told[len(own)][arm.name]["bits_per_byte"]["mean"] == 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["try", "steps"], "'steps' is not KEY=VALUE"),
        (["try", "stesp=3"], "stesp"),
        (["run", "no-such-arm"], "no arm named no-such-arm"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--results", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_sweep_goes_downhill_from_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def result(run: Run, tell: object) -> dict[str, float]:
        asked.append((run.inner.lr, run.seed))
        found = {"bits_per_byte": abs(run.inner.lr - 0.2) + run.seed}
        cache.put(run, found)
        return found

    cache = Cache(tmp_path)
    monkeypatch.setattr(cache, "result", result)
    command.fill(Arm("one", "", Run(), rates=(0.5, 0.1, 0.2, 0.3, 0.4), seeds=(1, 2)), cache)
    assert asked == [(0.3, 1), (0.4, 1), (0.2, 1), (0.1, 1), (0.2, 1), (0.2, 2)]
    assert command.climb([1.0, 2.0, 3.0], lambda rate: -rate) == 3.0
    assert command.climb([0.1], lambda rate: 1.0) == 0.1
