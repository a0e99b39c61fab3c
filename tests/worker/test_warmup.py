"""Whole workers in a run that begins with the first cell alone: they wait, save with it, and come back exactly."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .rehearsal import Run, recipe, same, until, write_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WARMUP, STEPS = 300, 316
RANKS = (1, 2)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    plan = recipe(
        write_text(tmp_path / "text"),
        exchange={"mode": "two-site", "warmup": WARMUP},
        training={"steps": STEPS},
        checkpoint={"every": 20},
        evaluation={"every": 100},
    )
    both = [Run(tmp_path / name, plan, ranks=RANKS, relay=True) for name in ("whole", "hurt")]
    yield both
    for run in both:
        run.end()


def test_a_kill_a_signal_a_stop_and_a_resume_within_the_warm_up_change_nothing(runs: list[Run]) -> None:
    whole, run = runs
    assert [outcome["outcome"] for outcome in whole.run()] == ["finished", "finished"]
    one, two = whole.cells
    assert same(*({k: v for k, v in cell.weights().items() if k.startswith("model/")} for cell in whole.cells))
    assert (min(one.losses()), min(two.losses())) == (1, WARMUP + 1)
    assert two.lines("waiting")[0]["reason"] == "the first cell's warm-up"
    assert two.lines("exchange")[-1]["rounds_skipped"] == 0

    first, second = run.cells
    second.start()
    with run.controller() as controller:

        def waits() -> bool:
            beat = controller.status().cells[1].heartbeat
            told = "waits for the first cell's warm-up"
            return beat is not None and (beat.state, beat.message) == ("waiting", told)

        until(waits, "the waiting cell's word")
        first.start()
        until(lambda: bool(second.checkpoints()), "the waiting cell's checkpoint")
        first.kill()
        second.term(1)  # rank 1 alone
        second.gone()
        for cell in (second, first):
            cell.start()
            until(lambda cell=cell: len(cell.lines("start")) == 2, "the cell's second life")  # type: ignore[misc]
        controller.stop("by the test")
        for cell in run.cells:
            assert cell.wait() == 0, cell.log()
        stopped = [cell.outcome() for cell in run.cells]
        assert [each["outcome"] for each in stopped] == ["stopped", "stopped"]
        assert stopped[0]["step"] == stopped[1]["step"] < WARMUP
        joint = controller.status().joint_checkpoints[-1]
        assert joint.step == stopped[0]["step"]
        controller.rewind(joint.step, joint.manifests, joint.versions)
    for cell in run.cells:
        cell.write_job(attempt=2)
    assert [outcome["outcome"] for outcome in run.run()] == ["finished", "finished"]
    for cell, untouched in zip(run.cells, whole.cells, strict=True):
        assert cell.losses() == untouched.losses()
        assert same(cell.weights(), untouched.weights())
