"""Whole workers, as processes: they end well, and come back exactly after any end."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from islandctl.ledger.entries import Checkpoint, Stop
from tests.disk import files_at_most, fill, mounted, needs_mount

from .rehearsal import Cell, Run, recipe, same, until, write_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Begin = Callable[..., Run]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    runs: list[Run] = []

    def one(plan: object, **options: object) -> Run:
        runs.append(Run(tmp_path / f"run-{len(runs)}", plan, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield one
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """One cell alone, never touched."""
    cell = Run(tmp_path_factory.mktemp("straight") / "run", recipe(text)).cells[0]
    assert cell.run()["outcome"] == "finished"
    return cell


def equal(one: Cell, other: Cell) -> bool:
    return one.losses() == other.losses() and one.curve() == other.curve() and same(one.weights(), other.weights())


def test_a_cell_alone_learns_and_tells(straight: Cell) -> None:
    assert list(straight.losses()) == list(range(1, 25))
    curve = straight.curve()
    assert list(curve) == [0, 8, 16, 24]
    assert curve[24] < curve[0] - 3
    assert straight.outcome()["reason"] == "all 24 steps are done"
    assert straight.checkpoints() == ["step-00000018-attempt-1", "step-00000024-attempt-1"]
    assert [line["kind"] for line in straight.lines("end")] == ["end"]
    assert "finished" in (straight.folder / "node-0" / "logs" / "rank-0.log").read_text()


def test_killed_at_any_moment_it_comes_back_bit_for_bit(straight: Cell, begin: Begin, text: Path) -> None:
    cell = begin(recipe(text)).cells[0]
    moments = random.Random(5)
    for _ in range(2):
        cell.start()
        goal = cell.step() + moments.randint(1, 8)
        until(lambda goal=goal: cell.step() >= goal, f"step {goal}")  # type: ignore[misc]
        cell.kill()
        assert not (cell.folder / "outcome.json").exists()
    assert cell.run()["outcome"] == "finished"
    assert equal(cell, straight)
    assert cell.lines("start")[-1]["checkpoint"].startswith("step-")


def test_a_signal_saves_and_stops_and_a_file_saves_and_goes_on(straight: Cell, begin: Begin, text: Path) -> None:
    cell = begin(recipe(text, checkpoint={"every": 1000})).cells[0]
    (cell.folder / "save").touch()
    cell.start()
    until(lambda: bool(cell.checkpoints()), "the checkpoint asked for")
    assert cell.process is not None
    cell.process.send_signal(signal.SIGTERM)
    assert cell.wait() == 0
    outcome = cell.outcome()
    assert (outcome["outcome"], outcome["retry"]) == ("stopped", True)  # who sent the signal is not known here
    assert not (cell.folder / "save").exists()
    assert cell.checkpoints()[-1] == f"step-{outcome['step']:08d}-attempt-1"
    assert cell.run()["outcome"] == "finished"
    assert cell.losses() == straight.losses()
    assert same(cell.weights(), straight.weights())


def test_two_ranks_train_as_one_would_and_come_back_too(straight: Cell, begin: Begin, text: Path) -> None:
    cell = begin(recipe(text), ranks=(2,)).cells[0]
    assert cell.run()["outcome"] == "finished"
    assert cell.losses() == pytest.approx(straight.losses(), rel=1e-4)
    assert cell.curve() == pytest.approx(straight.curve(), rel=1e-4)

    again = begin(recipe(text), ranks=(2,)).cells[0]
    again.start()
    until(lambda: again.step() >= 8, "step 8")
    again.kill()
    assert again.run()["outcome"] == "finished"
    assert equal(again, cell)


def test_two_ranks_with_shampoo_come_back_bit_for_bit(straight: Cell, begin: Begin, text: Path) -> None:
    plan = recipe(text, training={"optimizer": {"kind": "shampoo", "lr": 3e-3, "refresh": 4}})
    cell, again = (begin(plan, ranks=(2,)).cells[0] for _ in range(2))
    assert cell.run()["outcome"] == "finished"
    assert cell.curve()[24] < cell.curve()[0] - 3
    assert cell.losses() != straight.losses()

    again.start()
    until(lambda: again.step() >= 8, "step 8")
    again.kill()
    assert again.run()["outcome"] == "finished"
    assert equal(again, cell)


def test_where_the_disk_is_full_training_goes_on(straight: Cell, begin: Begin, text: Path) -> None:
    cell = begin(recipe(text)).cells[0]
    with files_at_most(100_000):  # children inherit it
        outcome = cell.run()
    assert (outcome["outcome"], outcome["step"], outcome["retry"]) == ("failed", 24, False)
    assert "all 24 steps are done, but no checkpoint" in outcome["reason"]
    assert "free space" in outcome["hint"]
    assert [path.name for path in (cell.folder / "checkpoints").iterdir()] == [".failed-step-00000024-attempt-1"]
    assert [line["step"] for line in cell.lines("checkpoint")] == [6, 12, 18, 24]
    assert all("File too large" in line["error"] for line in cell.lines("checkpoint"))
    assert cell.run()["outcome"] == "finished"
    assert equal(cell, straight)


def test_wrong_data_is_told_in_one_line_and_not_repeated(begin: Begin, tmp_path: Path) -> None:
    cell = begin(recipe(tmp_path / "missing")).cells[0]
    outcome = cell.run()
    assert (outcome["outcome"], outcome["retry"]) == ("failed", False)
    assert str(tmp_path / "missing") in outcome["reason"]
    assert "\n" not in outcome["reason"]
    assert outcome["hint"]
    log = (cell.folder / "node-0" / "logs" / "rank-0.log").read_text().splitlines()
    assert "Traceback" not in "".join(log)
    assert log[-2].endswith(f"ERROR failed: {outcome['reason']}")
    assert log[-1].endswith(f"INFO hint: {outcome['hint']}")


@needs_mount
def test_a_full_disk_ends_neither_the_training_nor_the_rounds(begin: Begin, text: Path, tmp_path: Path) -> None:
    """Every round is journaled before it is applied, and the reason of the end is told on the full disk itself."""
    run = begin(recipe(text, exchange={"mode": "two-site"}, training={"steps": 40}), ranks=(1, 1), relay=True)
    hurt, other = run.cells
    with mounted(tmp_path / "disk", 4 << 20) as disk:
        shutil.copytree(hurt.folder, disk / "cell")
        shutil.rmtree(hurt.folder)
        hurt.folder.symlink_to(disk / "cell")
        old = b"".join(b'{"attempt":9,"fragment":0,"seq":0,"step":0,"window":%d}\n' % window for window in range(67))
        assert 3700 < len(old) < 3900  # a few rounds more, and the journal needs a block that there is not
        (disk / "cell" / "journal.jsonl").write_bytes(old)
        for cell in run.cells:
            cell.start()
        until(lambda: hurt.step() >= 8, "step 8")
        fill(disk)
        assert hurt.wait() == 1
        outcome = hurt.outcome()
        assert (outcome["outcome"], outcome["step"], outcome["retry"]) == ("failed", 40, False)
        assert "all 40 steps are done, but no checkpoint" in outcome["reason"]
        assert "No space left on device" in outcome["reason"]
        assert other.wait() == 0, other.log()
        assert other.lines("exchange")[-1]["rounds_applied"] == 12
        hurt.folder.unlink()


def test_two_cells_survive_kills_of_cell_and_relay_a_stop_and_a_resume(begin: Begin, text: Path) -> None:
    plan = recipe(text, exchange={"mode": "two-site"}, training={"steps": 40})
    whole = begin(plan, ranks=(1, 1), relay=True)
    assert [outcome["outcome"] for outcome in whole.run()] == ["finished", "finished"]
    weights = [{k: v for k, v in cell.weights().items() if k.startswith("model/")} for cell in whole.cells]
    assert same(*weights)
    assert whole.cells[0].lines("exchange")[-1]["rounds_applied"] == 12

    run = begin(plan, ranks=(1, 1), relay=True)
    for cell in run.cells:
        cell.start()
    first = run.cells[0]
    until(lambda: first.step() >= 9, "step 9")
    first.kill()
    first.start()
    run.kill_relay()
    run.start_relay()
    until(lambda: first.step() >= 14, "step 14")
    with run.controller() as controller:
        controller.stop("by the test")
        for cell in run.cells:
            assert cell.wait() == 0, cell.log()
        stopped = [cell.outcome() for cell in run.cells]
        assert [each["outcome"] for each in stopped] == ["stopped", "stopped"]
        assert stopped[0]["step"] == stopped[1]["step"] < 40
        joint = controller.status().joint_checkpoints[-1]
        assert joint.step == stopped[0]["step"]
        controller.rewind(joint.step, joint.manifests, joint.versions)
        ledger = controller.entries(-1, 0.0)
    assert any(isinstance(entry, Stop) for entry in ledger)
    assert {entry.cell for entry in ledger if isinstance(entry, Checkpoint)} == {0, 1}
    for cell in run.cells:
        cell.write_job(attempt=2)
    assert [outcome["outcome"] for outcome in run.run()] == ["finished", "finished"]
    for cell, untouched in zip(run.cells, whole.cells, strict=True):
        assert equal(cell, untouched)


def test_a_signal_is_heard_while_a_round_is_waited_for(begin: Begin, text: Path) -> None:
    """The other cell is not there. By a signal to the group, and to the last rank alone: both continue exactly."""
    plan = recipe(text, exchange={"mode": "two-site"}, training={"steps": 16})
    whole = begin(plan, ranks=(2, 1), relay=True)
    assert [outcome["outcome"] for outcome in whole.run()] == ["finished", "finished"]

    run = begin(plan, ranks=(2, 1), relay=True)
    first = run.cells[0]

    def waits_at(step: int) -> bool:
        with run.controller() as controller:
            beat = controller.status().cells[0].heartbeat
        return beat is not None and (beat.state, beat.step) == ("waiting", step)

    for step, rank in ((5, None), (0, 1)):  # the second time it has not come to train
        first.start()
        until(lambda step=step: waits_at(step), "the wait for the round")  # type: ignore[misc]
        first.term(rank)
        began = time.monotonic()
        until((first.folder / "outcome.json").exists, "the outcome")
        assert time.monotonic() - began < 5
        first.gone()
        assert first.outcome()["outcome"] == "stopped"
        assert first.outcome()["step"] == 6
        assert first.checkpoints() == ["step-00000006-attempt-1"]
    assert "removed" not in whole.cells[0].log(rank=1)  # only rank 0 knows what is joint
    assert [outcome["outcome"] for outcome in run.run()] == ["finished", "finished"]
    for cell, untouched in zip(run.cells, whole.cells, strict=True):
        assert equal(cell, untouched)
