"""One rank's part: training steps, evaluation, what is refused."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from islandctl.config.job import CellJob
from islandctl.errors import ConfigError, NotFiniteError
from islandctl.worker.cell import Cell
from islandctl.worker.parallel import Ranks
from islandctl.worker.text import read_text

from .rehearsal import recipe, write_text

ALONE = Ranks(0, 1, torch.device("cpu"))


def job(folder: Path, *, cell: int = 0, **changes: object) -> CellJob:
    text = folder / "text"
    plan = recipe(text if text.exists() else write_text(text), **changes)
    return CellJob(
        run="r", attempt=1, cell=cell, cells=("a", "b"), site="a", num_ranks=1, config_hash="c", recipe=plan
    )


def made(folder: Path, *, cell: int = 0, ranks: Ranks = ALONE, **changes: object) -> Cell:
    own = job(folder, cell=cell, **changes)
    return Cell(own, ranks, read_text(own.recipe.text, sequence=own.recipe.training.sequence))


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


STEP = """
import sys
from islandctl.worker.cell import Cell, CellJob, Ranks
from islandctl.worker.text import read_text
job = CellJob.model_validate_json(sys.argv[1])
cell = Cell(job, Ranks.start(1), read_text(job.recipe.text, sequence=job.recipe.training.sequence))
cell.train_step(0)
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
def test_torchs_compiler_is_not_loaded_for_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEP, job(tmp_path).model_dump_json()], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


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
