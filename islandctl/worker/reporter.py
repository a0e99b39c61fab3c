"""What rank 0 tells the relay beside the loop: signs of life, and whole checkpoints in order.

Nothing here can hurt the training: without an answer it tries again, and remembers what is still to tell. Only a
verdict of the relay on the cell itself (its held-out text differs, its attempt is over) is handed to the loop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from islandctl.config.job import CellJob
from islandctl.errors import RelayError, UnreachableError
from islandctl.ledger.entries import Checkpoint, Entry, Stop
from islandctl.ledger.joint import Lineage
from islandctl.relay.messages import HEARTBEAT_S, Heartbeat
from islandctl.worker.checkpoint import Saved, delete, prune, unsaved
from islandctl.worker.outcome import FINAL_CODES
from islandctl.worker.pulse import Pulse

log = logging.getLogger(__name__)
State = Literal["starting", "training", "waiting", "evaluating", "checkpointing", "finished", "stopped", "failed"]


class Relay(Protocol):
    """The part of the relay's client that is used here."""

    def heartbeat(self, heartbeat: Heartbeat) -> Any:
        """Tell a sign of life."""

    def register_checkpoint(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> Any:
        """Tell of a whole checkpoint."""

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        """Ledger entries after a sequence number."""


class Reporter:
    """Owns the thread that speaks for the cell.

    Args:
        relay: None for a run without one; then nothing is told, and every own checkpoint counts as joint.
        first: the heartbeat to begin with.
        checkpoints: the folder to tidy, keeping ``keep`` (at least two) joint ones.
        spent: whether the budget is used up. Then the relay is asked to stop all cells; without one, this cell stops.
        pulse: beats with everything that the loop tells.
    """

    def __init__(
        self,
        relay: Relay | None,
        first: Heartbeat,
        *,
        num_cells: int,
        checkpoints: Path,
        keep: int,
        spent: Callable[[], bool] = lambda: False,
        pulse: Pulse | None = None,
    ) -> None:
        self._pulse = pulse
        self._spent = spent
        self.relay, self.checkpoints, self.keep = relay, checkpoints, max(2, keep)
        self.verdict: RelayError | None = None
        """Why the cell must not go on."""
        self.stop_heard = False
        """The ledger has a stop entry of this attempt; without a relay: the budget is used up."""
        self._lineage, self._seq = Lineage(num_cells), -1
        self._joint: list[tuple[int, int]] = []
        self._alone: list[tuple[int, int]] = []
        self._beat = first
        self._unsaved = unsaved(checkpoints, first.attempt)
        """Told as long as there is nothing else to tell: an earlier life may have left it so."""
        self._lock = threading.Lock()
        self._to_register: deque[tuple[Saved, tuple[int, ...]]] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._silent = False
        self._give_up = 0.0
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def update(self, **fields: Any) -> None:
        """Change fields of the next heartbeat."""
        with self._lock:
            self._beat = self._beat.model_copy(update=fields)
        if self._pulse is not None:
            self._pulse.beat(self._beat.state, self._beat.step)

    @contextmanager
    def doing(self, state: State) -> Iterator[None]:
        """The cell is in ``state`` inside the block, and back in the one before after it."""
        before = self._beat.state
        self.update(state=state)
        try:
            yield
        finally:
            self.update(state=before)

    def register(self, saved: Saved, versions: Sequence[int]) -> None:
        """Tell the relay of a whole checkpoint, as soon as it can be reached."""
        with self._lock:
            self._to_register.append((saved, tuple(versions)))
            self._unsaved = unsaved(self.checkpoints, self._beat.attempt)
        self._wake.set()

    def close(self, *, wait_s: float) -> bool:
        """Tell the last state and what is left to register.

        Returns:
            False when the relay could not be told within ``wait_s`` seconds.
        """
        self._give_up = time.monotonic() + wait_s
        self._closing.set()
        self._wake.set()
        self._thread.join(wait_s + HEARTBEAT_S)
        return not self._thread.is_alive() and not self._to_register

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            told = self._tell()
            if closing and (told or time.monotonic() > self._give_up):
                return
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()

    def _tell(self) -> bool:
        """One round of messages; True when all could be told."""
        if self.relay is None:
            self._register_all()
            self.stop_heard |= self._spent()
            return True
        try:
            self._register_all()
            self._follow(self.relay)
            with self._lock:
                told = {"spent": self._spent(), "message": self._beat.message or self._unsaved}
                beat = self._beat.model_copy(update=told)
            self.relay.heartbeat(beat)
        except UnreachableError as error:
            if not self._silent:
                log.warning("the relay does not answer (%s); training goes on", error.message)
            self._silent = True
            self._thin()
            return False
        except RelayError as error:
            if error.code in FINAL_CODES - {"halted"}:
                self.verdict = error
            log.warning("the relay refused a heartbeat: %s", error.message)
        if self._silent:
            log.info("the relay answers again")
        self._silent = False
        return True

    def _register_all(self) -> None:
        while self._to_register:
            saved, versions = self._to_register[0]
            if self.relay is not None:
                try:
                    self.relay.register_checkpoint(saved.step, saved.manifest, versions, saved.attempt)
                except RelayError as error:
                    log.warning("the relay refused the checkpoint of step %d: %s", saved.step, error.message)
                self._follow(self.relay)
            else:
                self._joint.append((saved.attempt, saved.step))
            self._to_register.popleft()
            try:
                for path in prune(self.checkpoints, joint=self._joint, keep=self.keep, alone=self._alone):
                    log.info("removed %s: newer checkpoints exist", path.name)
            except OSError as error:
                log.warning("cannot tidy %s: %s", self.checkpoints, error)

    def _thin(self) -> None:
        """Without the relay nothing becomes joint, so ``prune`` lets nothing go, and checkpoints would pile up.

        Kept are the newest ones, where this cell comes back by itself and cells of equal speed come back together;
        and the first one, which all cells have passed, and which the relay may have heard of after all.
        """
        while len(self._to_register) > self.keep + 1:
            with self._lock:
                saved, _ = self._to_register[1]
                del self._to_register[1]
            try:
                delete(saved.path)
                log.info("removed %s: the relay is away, and newer checkpoints exist", saved.path.name)
            except OSError as error:
                log.warning("cannot tidy %s: %s", self.checkpoints, error)

    def _follow(self, relay: Relay) -> None:
        """Read on in the ledger."""
        while entries := relay.entries(self._seq, 0.0):
            for entry in entries:
                self._lineage.add(entry)
                self.stop_heard |= isinstance(entry, Stop) and entry.attempt == self._beat.attempt
                self._seq = entry.seq
        self._joint = [(one.attempt, one.step) for one in self._lineage.kept(self.keep)]
        self._alone = self._lineage.alone(self._beat.cell)


def registered(entries: Sequence[Entry], saved: Saved, cell: int) -> bool:
    """Does the ledger know this checkpoint of ``cell``?"""
    return any(
        isinstance(entry, Checkpoint) and (entry.cell, entry.manifest) == (cell, saved.manifest) for entry in entries
    )


def first_heartbeat(job: CellJob, held_out_hash: str) -> Heartbeat:
    """The sign of life of a cell that has not trained yet."""
    return Heartbeat(
        attempt=job.attempt,
        cell=job.cell,
        state="starting",
        step=0,
        steps=job.pace.own_step(job.recipe.training.steps),
        tokens=0,
        tokens_per_s=0.0,
        held_out_hash=held_out_hash,
        life=life(),
    )


def life() -> str:
    """Which life of the workers this is, as their supervisor counts; empty without one."""
    return os.environ.get("ISLANDCTL_LIFE", "")
