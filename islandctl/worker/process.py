"""This process, as a rank of a cell that ``islandctl launch`` has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.errors import UsageError
from islandctl.worker.parallel import Ranks
from islandctl.worker.pulse import Pulse
from islandctl.worker.wishes import Wishes

if TYPE_CHECKING:
    from islandctl.worker.session import Session


class Process:
    """What the process knows before it trains.

    Args:
        folder: the cell's.
        job: ``cell.json``.
        wishes: what the outside asks for.
        pulse: what shows the outside that it gets on.
    """

    def __init__(self, folder: CellFolder, job: CellJob, wishes: Wishes, pulse: Pulse | None = None) -> None:
        self.folder, self.job, self.wishes = folder, job, wishes
        self.pulse = pulse or Pulse(None, 0)
        self.ranks: Ranks | None = None
        """The cell's ranks, once they are together."""
        self.session: Session | None = None
        """What was attached."""

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.session.done if self.session else 0


_here: Process | None = None


def enter(process: Process) -> Process:
    """From now on ``attach`` finds it."""
    global _here
    _here = process
    return process


def here() -> Process:
    """The process that was entered.

    Raises:
        UsageError: none was: nobody has launched this.
    """
    if _here is None:
        raise UsageError(
            "attach: this process was not started by `islandctl launch`, so there is no run to attach to. Name the "
            "script in worker.command of a recipe and launch that; or let islandctl.run_cells run the cells inside "
            "this process and give attach its place: transport=place. docs/attach.md shows both"
        )
    return _here
