"""One rank's part: training steps, evaluation, what is refused."""

import math
from pathlib import Path

import pytest
import torch

from islandctl.config.job import CellJob
from islandctl.errors import ConfigError
from islandctl.worker.cell import Cell
from islandctl.worker.outcome import NotFiniteError
from islandctl.worker.parallel import Ranks
from islandctl.worker.text import read_text

from .rehearsal import recipe, write_text

ALONE = Ranks(0, 1, torch.device("cpu"))


def made(folder: Path, *, cell: int = 0, ranks: Ranks = ALONE, **changes: object) -> Cell:
    text = folder / "text"
    plan = recipe(text if text.exists() else write_text(text), **changes)
    job = CellJob(
        run="r", attempt=1, cell=cell, cells=("a", "b"), site="a", num_ranks=1, config_hash="c", recipe=plan
    )
    return Cell(job, ranks, read_text(plan.data, sequence=plan.training.sequence))


def test_bits_per_byte_are_the_mean_of_minus_log2_of_each_bytes_probability(tmp_path: Path) -> None:
    cell = made(tmp_path)
    rows = cell.held_out
    with torch.no_grad():
        probs = cell.model(rows[:, :-1])[0].softmax(-1).double()
    surprise = -torch.log2(probs.gather(-1, rows[:, 1:, None]))
    assert cell.evaluate() == pytest.approx(surprise.mean().item(), rel=1e-6)


def test_training_learns_and_evaluation_changes_nothing(tmp_path: Path) -> None:
    cell, quiet = made(tmp_path), made(tmp_path)
    before = cell.evaluate()
    losses = [cell.train_step(step).loss for step in range(12)]
    assert losses == [quiet.train_step(step).loss for step in range(12)]
    assert cell.evaluate() < before - 2
    assert losses[0] == pytest.approx(math.log(256), abs=1.0)


def test_cells_begin_alike_and_read_different_text(tmp_path: Path) -> None:
    one, two = made(tmp_path), made(tmp_path, cell=1)
    assert all(torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)
    assert torch.equal(one.held_out, two.held_out)
    assert not torch.equal(one.sequences.take(4), two.sequences.take(4))


def test_a_loss_that_is_no_number_stops_before_the_weights_are_touched(tmp_path: Path) -> None:
    cell = made(tmp_path)
    with torch.no_grad():
        cell.parameters["head.weight"][0, 0] = math.nan
    before = cell.parameters["norm.weight"].detach().clone()
    with pytest.raises(NotFiniteError, match="at step 1"):
        cell.train_step(0)
    assert torch.equal(cell.parameters["norm.weight"], before)


def test_fewer_sequences_than_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.batch: 4 sequences cannot be shared by 5 ranks"):
        made(tmp_path, ranks=Ranks(0, 5, torch.device("cpu")))
