"""The checkpoints of one rank of a launched cell: what is written together, and which one is taken at a start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from islandctl.config.job import CellJob
from islandctl.ledger.entries import Entry
from islandctl.worker import checkpoint as checkpoints
from islandctl.worker import tensors as disk
from islandctl.worker.alone import Exchanger
from islandctl.worker.checkpoint import Saved, TrainingState
from islandctl.worker.parallel import Ranks
from islandctl.worker.reporter import Reporter, registered
from islandctl.worker.trained import Trained

log = logging.getLogger("islandctl.worker")


class Keeper:
    """Writes and loads them. Collective over the cell's ranks.

    Args:
        folder: of the checkpoints.
        job: the cell's.
        trained, exchanger: what they hold.
        reporter: tells the relay of them.
        map_hash, held_out_hash: of the fragment map and of the text that is evaluated on.
    """

    def __init__(
        self,
        folder: Path,
        job: CellJob,
        ranks: Ranks,
        trained: Trained,
        exchanger: Exchanger,
        reporter: Reporter,
        *,
        map_hash: str,
        held_out_hash: str,
    ) -> None:
        self.folder, self._job, self._ranks = folder, job, ranks
        self._trained, self._exchanger, self._reporter = trained, exchanger, reporter
        self._map_hash, self._held_out_hash = map_hash, held_out_hash

    def restore(self, entries: Sequence[Entry]) -> tuple[Saved, TrainingState] | None:
        """Load the right checkpoint into model, optimizer, objects and exchange. None: this is the beginning.

        Args:
            entries: the ledger.

        Raises:
            CheckpointError: the one that the attempt began with cannot be used.
        """
        job, ranks = self._job, self._ranks
        saved = checkpoints.choose(self.folder, attempt=job.attempt, cell=job.cell, entries=entries, ranks=ranks)
        if saved is None:
            return None
        state = checkpoints.read_state(
            saved.path, run=job.run, config_hash=job.config_hash, cell=job.cell, num_ranks=ranks.size
        )
        targets = self._trained.targets(disk.shapes(saved.path, saved.files))
        own = disk.load(saved.path, targets, saved.files, ranks)
        self._trained.take(own)
        self._exchanger.load_state_dict(
            {key.removeprefix("island/"): tensor for key, tensor in own.items() if key.startswith("island/")}
        )
        if saved.attempt == job.attempt and not registered(entries, saved, job.cell):
            self._register(saved, state)
        if ranks.leads:
            log.info("continuing from %s", saved.path.name)
        return saved, state

    def write(self, step: int, tokens: int, evaluated: Sequence[tuple[int, float]]) -> Saved:
        """Write one checkpoint and have the relay told.

        Raises:
            CheckpointError: at every rank, when any could not write. Earlier checkpoints stand.
        """
        state = TrainingState(
            run=self._job.run,
            config_hash=self._job.config_hash,
            map_hash=self._map_hash,
            cell=self._job.cell,
            num_ranks=self._ranks.size,
            attempt=self._job.attempt,
            step=step,
            tokens=tokens,
            versions=tuple(self._exchanger.versions()),
            held_out_hash=self._held_out_hash,
            bits_per_byte=tuple(evaluated),
        )
        own = self._trained.own()
        own |= {f"island/{key}": tensor for key, tensor in self._exchanger.state_dict().items()}
        own = {f"rank-{self._ranks.rank}/{key}": tensor for key, tensor in own.items()}
        saved = checkpoints.write(self.folder, state, self._trained.tensors() | own, self._ranks)
        self._register(saved, state)
        if self._ranks.leads:
            log.info("checkpoint %s", saved.path.name)
        return saved

    def _register(self, saved: Saved, state: TrainingState) -> None:
        """Have rank 0 tell the relay; it alone knows which checkpoints are joint, and so which older ones may go."""
        if self._ranks.leads:
            self._reporter.register(saved, state.versions)
