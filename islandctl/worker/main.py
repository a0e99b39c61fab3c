"""The built-in training loop, from the first evaluation to the last. It reads from top to bottom."""

from __future__ import annotations

from islandctl.worker.attach import attach
from islandctl.worker.cell import Cell
from islandctl.worker.parallel import Ranks
from islandctl.worker.process import Process
from islandctl.worker.text import read_text


def train(process: Process) -> None:
    """Train the recipe's model on the recipe's text, to the end or to a stop.

    Raises:
        IslandError: what ended it.
    """
    job, recipe = process.job, process.job.recipe
    process.ranks = Ranks.start(job.num_ranks)
    text = read_text(recipe.text, sequence=recipe.training.sequence)
    cell = Cell(job, process.ranks, text)
    island = attach(cell.model, cell.inner, state={"data": cell.sequences}, held_out_hash=text.held_out_hash)
    if not island.evaluated:
        island.evaluate(cell.evaluate)
    for step in island.steps():
        result = cell.train_step(step)
        done = island.step(**vars(result))
        if island.is_due(recipe.evaluation.every) and done < island.num_steps:
            island.evaluate(cell.evaluate)
    if island.finish():
        island.evaluate(cell.evaluate)
