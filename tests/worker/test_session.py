"""A script of the user's own inside the worker's process: what it gets, and how its ends are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.config.recipe import Recipe
from islandctl.errors import ConfigError, IslandError, RunError, UsageError
from islandctl.worker import process as processes
from islandctl.worker.__main__ import work
from islandctl.worker.checkpoint import listing
from islandctl.worker.outcome import Outcome
from islandctl.worker.process import Process, enter
from islandctl.worker.session import Clock
from islandctl.worker.wishes import Wishes

RECIPE = {
    "name": "own",
    "training": {"steps": 12, "batch": 2, "sequence": 4},
    "exchange": {"mode": "none"},
    "checkpoint": {"every": 5},
    "worker": {"command": ["python", "train.py"]},
}
HEAD = """
import os, random, torch, islandctl
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
torch.nn.init.normal_(model.weight); torch.nn.init.zeros_(model.bias)
"""
LOOP = (
    HEAD
    + """
island = islandctl.attach(model, optimizer)
if not island.evaluated:
    island.evaluate(lambda: 8.0)
for step in island.steps():
    loss = (model(torch.randn(4, 3)) * random.random()).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    island.step(loss=loss.detach())
    if island.done == int(os.environ.get("FALL_AT", 0)):
        raise RuntimeError("fallen")
    if island.done % 4 == 0:
        island.evaluate(lambda: 8.0 / island.done)
island.finish()
torch.save(model.state_dict(), "end.pt")
"""
)
Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script as one life of a cell that is alone; gives the outcome, or raises what the script did."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "_here", None)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.setattr("sys.argv", ["-"])

    def one(script: str, folder: str = "cell", *args: str) -> Outcome:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / "train.py").write_text(script)
        job = CellJob(
            run="r", attempt=1, cell=0, cells=("a",), site="a", num_ranks=1, config_hash="c",
            recipe=Recipe.model_validate(RECIPE),
        )  # fmt: skip
        process = enter(Process(CellFolder(PurePosixPath(tmp_path / folder)), job, Wishes(tmp_path / folder)))
        outcome = Outcome.ended("stopped", "", step=0)
        try:
            outcome = work(process, ["train.py", *args])
        finally:
            if process.session is not None:
                process.session.leave(outcome)
        return outcome

    return one


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_an_unusual_wait_is_left_out_of_the_rate_and_usual_ones_are_not() -> None:
    """Steps of 1 s with a wait of 2 s in every tenth; then the relay is away for 100 s."""
    clock, now, rate = Clock(0, now=0.0), 0.0, 0.0
    for step in range(1, 101):
        stood = 2.0 if step % 10 == 0 else 0.01
        now += 1.0 + stood
        rate = clock.tick(100 * step, stood_s=stood, now=now)
    usual = 2000 / (20 + 4 + 0.18)
    assert rate == pytest.approx(usual, rel=0.01)
    assert clock.tick(10_100, stood_s=100.0, now=now + 101.0) == pytest.approx(usual, rel=0.1)
    assert clock.tick(10_200, stood_s=0.01, now=now + 102.01) == pytest.approx(usual, rel=0.1)


def test_a_script_that_falls_goes_on_bit_for_bit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(LOOP, "whole").reason == "all 12 steps are done"
    whole = torch.load("end.pt")
    monkeypatch.setenv("FALL_AT", "9")
    with pytest.raises(RuntimeError, match="fallen"):
        run(LOOP)
    assert [saved.step for saved in listing(tmp_path / "cell" / "checkpoints")] == [5]
    monkeypatch.setenv("FALL_AT", "0")
    assert run(LOOP).outcome == "finished"
    again = torch.load("end.pt")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    told = [{line["step"]: line["loss"] for line in lines(tmp_path / name, "train")} for name in ("whole", "cell")]
    assert told[0] == told[1]
    assert sorted(told[0]) == list(range(1, 13))
    curve = {line["step"]: line["bits_per_byte"] for line in lines(tmp_path / "cell", "eval")}
    assert curve == {0: 8.0, 4: 2.0, 8: 1.0, 12: 8.0 / 12}
    assert [line["checkpoint"] for line in lines(tmp_path / "cell", "start")] == ["", "step-00000005-attempt-1"]
    assert lines(tmp_path / "cell", "train")[-1]["tokens"] == 12 * 8


def test_a_wish_to_stop_ends_the_loop_with_a_checkpoint(run: Run, tmp_path: Path) -> None:
    wish = "    if step == 6: from islandctl.worker import process; process.here().wishes.stopping = True\n"
    script = LOOP.replace("    if island.done ==", wish + "    if island.done ==")
    outcome = run(script)
    assert (outcome.outcome, outcome.reason, outcome.step) == ("stopped", "stopped by a signal", 7)
    assert listing(tmp_path / "cell" / "checkpoints")[0].step == 7
    assert run(LOOP).outcome == "finished"


def test_words_after_the_script_are_its_own(run: Run) -> None:
    script = "import sys; assert sys.argv == ['train.py', '--lr', '1'], sys.argv\n" + LOOP
    assert run(script, "cell", "--lr", "1").outcome == "finished"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("", UsageError, r"train\.py ended without islandctl\.attach\(\)"),
        (HEAD + "islandctl.attach(model, optimizer)", UsageError, "ended at step 0 of 12 without island.finish"),
        (HEAD + "islandctl.attach(model, optimizer).step()", UsageError, "outside of `for step in island.steps"),
        (HEAD + "islandctl.attach(model, optimizer).finish()", UsageError, "after 0 of 12 steps"),
        (HEAD + "for i in 'ab': islandctl.attach(model, optimizer)", UsageError, "for the second time"),
        (HEAD + "islandctl.attach(model, optimizer, steps=3)", UsageError, "steps is given, but no transport"),
        (
            HEAD + "i = islandctl.attach(model, optimizer)\nfor _ in i.steps(): i.step(time=1)",
            UsageError,
            "'time' is noted already",
        ),
        (
            HEAD + "i = islandctl.attach(model, optimizer)\nfor _ in i.steps(): i.step(); break\ni.step()",
            UsageError,
            "outside of `for step in island.steps",
        ),
        (
            HEAD + "i = islandctl.attach(model, optimizer)\nfor _ in i.steps(): i.step(loss=torch.ones(2))",
            UsageError,
            "loss must be a single number, not a Tensor",
        ),
        (HEAD + "islandctl.attach(model, [])", ConfigError, "'weight' is trained .requires_grad., but no optimizer"),
        ("import sys; sys.exit('no data')", RunError, r"train\.py: ended with 'no data'"),
        ("import sys; sys.exit(3)", RunError, "ended with 3"),
    ],
)
def test_what_a_script_does_wrong_is_one_line(run: Run, script: str, kind: type[IslandError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        run(script)
    assert "\n" not in caught.value.message


def test_a_script_that_is_not_there(tmp_path: Path, run: Run) -> None:
    run(LOOP)
    (tmp_path / "train.py").unlink()
    with pytest.raises(ConfigError, match=r"worker\.command: train\.py is not here") as caught:
        work(processes.here(), ["train.py"])
    assert "worker.files" in caught.value.hint
