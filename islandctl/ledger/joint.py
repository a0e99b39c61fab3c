"""Joint checkpoints: the steps to which all cells can go back together, read from the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from islandctl.config.model import Model
from islandctl.ledger.entries import Checkpoint, Commit, Entry, Rewind


class JointCheckpoint(Model):
    """A step at which every cell has registered a checkpoint with equal versions."""

    attempt: int
    step: int
    manifests: tuple[str, ...]
    """In cell order."""
    versions: tuple[int, ...]


class Unjoined(Model):
    """A step with checkpoints that cannot be resumed from, and why."""

    attempt: int
    step: int
    reason: str


class Lineage:
    """Folds ledger entries, in order, into the joint checkpoints of the run's present history.

    A rewind to step S cuts off what its attempt did after S. What remains is one line of ancestors: the joint
    checkpoints of the present attempt, the rewind's target, and those before it.
    """

    def __init__(self, num_cells: int) -> None:
        self._num_cells = num_cells
        self._attempt = 1
        self._registered: dict[int, dict[int, Checkpoint]] = {}  # of this attempt: step → cell → entry
        self._joint: dict[int, JointCheckpoint] = {}
        self._cut: list[Unjoined] = []
        self._passed: dict[int, int] = {}  # joint step → how many a cell had behind it, while it went on alone
        self._alone_seq = -1  # the last commit that did not wait for somebody

    def add(self, entry: Entry) -> JointCheckpoint | None:
        """Take in one entry; gives the joint checkpoint that it completes, if it does."""
        if isinstance(entry, Rewind):
            self._rewind(entry)
        elif isinstance(entry, Checkpoint) and entry.attempt == self._attempt:
            # A cell that repeats its steps may register a step again: the last one is what lies on its disk.
            self._registered.setdefault(entry.step, {})[entry.cell] = entry
            return self._join(entry.step)
        elif isinstance(entry, Commit) and entry.reason == "alone":
            self._alone_seq = entry.seq
        return None

    def registered(self, step: int, cell: int) -> Checkpoint | None:
        """What ``cell`` has registered at ``step`` in the present attempt."""
        return self._registered.get(step, {}).get(cell)

    @property
    def joint(self) -> list[JointCheckpoint]:
        """Oldest first."""
        return [self._joint[step] for step in sorted(self._joint)]

    def alone(self, cell: int) -> list[tuple[int, int]]:
        """(attempt, step) of what ``cell`` has registered in this attempt, and a cell that was away has not.

        Rounds were committed since then without that cell. So it will hardly come by there: it rejoins further on.
        """
        return [
            (self._attempt, step)
            for step, entries in sorted(self._registered.items())
            if cell in entries and step not in self._joint and entries[cell].seq < self._alone_seq
        ]

    def kept(self, keep: int) -> list[JointCheckpoint]:
        """The joint checkpoints, oldest first, that cells still have which keep ``keep`` of those in ``alone``.

        A cell that was away may complete one when the others have removed their part of it already.
        """
        return [one for one in self.joint if self._passed.get(one.step, 0) < keep]

    def unjoined(self, cells: Sequence[str]) -> list[Unjoined]:
        """Why steps newer than the newest joint checkpoint do not count, oldest first. ``cells``: names in order."""
        newest = max(self._joint, default=-1)
        present = [
            Unjoined(attempt=self._attempt, step=step, reason=self._reason(step, cells))
            for step in sorted(self._registered)
            if step > newest
        ]
        return [one for one in self._cut if one.step > newest] + present

    def _join(self, step: int) -> JointCheckpoint | None:
        entries = self._registered[step]
        if len(entries) < self._num_cells or len({entry.versions for entry in entries.values()}) > 1:
            if step in self._joint and self._joint[step].attempt == self._attempt:
                del self._joint[step]  # a cell has registered the step anew, and differently
            return None
        checkpoint = JointCheckpoint(
            attempt=self._attempt,
            step=step,
            manifests=tuple(entries[cell].manifest for cell in range(self._num_cells)),
            versions=entries[0].versions,
        )
        if step not in self._joint:
            self._passed[step] = max(self._newer(cell, entry) for cell, entry in entries.items())
        self._joint[step] = checkpoint
        return checkpoint

    def _newer(self, cell: int, entry: Checkpoint) -> int:
        """How many newer ones the cell has registered, if meanwhile it went on alone."""
        newer = [step for step, entries in self._registered.items() if step > entry.step and cell in entries]
        return len(newer) if entry.seq < self._alone_seq else 0

    def _rewind(self, entry: Rewind) -> None:
        for step in sorted(self._joint):
            if step > entry.step:
                gone = self._joint.pop(step)
                reason = f"given up: attempt {entry.attempt} began at step {entry.step}"
                self._cut.append(Unjoined(attempt=gone.attempt, step=step, reason=reason))
        if entry.manifests and entry.step not in self._joint:
            self._joint[entry.step] = JointCheckpoint(
                attempt=self._attempt, step=entry.step, manifests=entry.manifests, versions=entry.versions
            )
        self._passed[entry.step] = 0  # it was found whole everywhere
        self._attempt = entry.attempt
        self._registered = {}

    def _reason(self, step: int, cells: Sequence[str]) -> str:
        entries = self._registered[step]
        missing = [name for cell, name in enumerate(cells) if cell not in entries]
        if missing:
            who = f"cell {missing[0]} has" if len(missing) == 1 else f"cells {', '.join(missing)} have"
            return f"{who} no checkpoint at step {step}"
        versions = {cells[cell]: entries[cell].versions for cell in sorted(entries)}
        for fragment in range(min(len(each) for each in versions.values())):
            seen = {name: each[fragment] for name, each in versions.items()}
            if len(set(seen.values())) > 1:
                told = ", ".join(f"{name} {version}" for name, version in seen.items())
                return f"the cells' versions of fragment {fragment} differ at step {step}: {told}"
        return f"the cells' versions differ at step {step}"


def joint_checkpoints(entries: Iterable[Entry], num_cells: int) -> list[JointCheckpoint]:
    """The joint checkpoints that a run can go back to, oldest first."""
    return _fold(entries, num_cells).joint


def unjoined(entries: Iterable[Entry], cells: Sequence[str]) -> list[Unjoined]:
    """Why steps newer than the newest joint checkpoint do not count, oldest first. ``cells``: names in order."""
    return _fold(entries, len(cells)).unjoined(cells)


def _fold(entries: Iterable[Entry], num_cells: int) -> Lineage:
    lineage = Lineage(num_cells)
    for entry in entries:
        lineage.add(entry)
    return lineage
