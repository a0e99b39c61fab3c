"""Small ledgers for the tests."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.ledger.chain import START, seal
from islandctl.ledger.entries import Checkpoint, Commit, Contribution, Entry, Genesis, Rewind, Stop

AT = "2030-01-01T00:00:00.000+00:00"


class Book:
    """Writes entries one after the other."""

    def __init__(self, cells: Sequence[str] = ("usa", "asia")) -> None:
        self.entries: list[Entry] = []
        self.attempt = 1
        self._add(Genesis, run="tale", config_hash="c", cells=tuple(cells), num_fragments=2)

    def _add(self, kind: type, **fields: object) -> None:
        head = self.entries[-1].hash if self.entries else START
        entry = kind(seq=len(self.entries), attempt=self.attempt, at=AT, previous="", **fields)
        self.entries.append(seal(entry, head))

    def checkpoint(self, cell: int, step: int, manifest: str = "", versions: tuple[int, ...] = (0, 0)) -> None:
        self._add(
            Checkpoint, cell=cell, step=step, manifest=manifest or f"{self.attempt}/{cell}/{step}", versions=versions
        )

    def joint(self, *steps: int) -> None:
        for step in steps:
            self.checkpoint(0, step)
            self.checkpoint(1, step)

    def rewind(self, step: int) -> None:
        manifests = {
            entry.cell: entry.manifest
            for entry in self.entries
            if isinstance(entry, Checkpoint) and entry.step == step
        }
        self.attempt += 1
        self._add(Rewind, step=step, manifests=tuple(manifests[cell] for cell in sorted(manifests)), versions=(0, 0))

    def alone(self, cell: int = 0) -> None:
        """A round that did not wait for the other cell."""
        named = (Contribution(cell=cell, step=1, tokens=1, chunks=("h",)),)
        self._add(Commit, fragment=0, window=0, version=1, named=named, missing=(1 - cell,), reason="alone")

    def stop(self) -> None:
        self._add(Stop, reason="enough")
