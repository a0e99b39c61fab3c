"""What one cell is told: the file ``cell.json`` in its folder, written by ``launch``, read by its workers."""

from __future__ import annotations

from pydantic import Field

from islandctl.config.model import Model
from islandctl.config.pace import Pace
from islandctl.config.recipe import Recipe


class CellJob(Model):
    """One cell's part in a run. Secrets are not in here: see ``token`` and ``ca.pem`` beside it."""

    run: str
    """Name of the run."""
    attempt: int = Field(ge=1)
    cell: int = Field(ge=0)
    """Index of this cell."""
    cells: tuple[str, ...]
    """Names of all cells, in order."""
    site: str
    num_ranks: int = Field(ge=1)
    config_hash: str
    recipe: Recipe
    window: int | None = None
    """Its own steps in a window; None: the recipe's."""

    @property
    def pace(self) -> Pace:
        """Its own steps against the run's."""
        return Pace.of(self.recipe.exchange, self.window)
