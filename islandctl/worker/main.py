"""The worker's life on one rank, from the first evaluation to the last checkpoint. It reads from top to bottom."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.errors import CheckpointError, IslandError, RelayError
from islandctl.exchange.island import Hurried
from islandctl.ledger.entries import Halt
from islandctl.relay.client import RelayClient
from islandctl.worker import checkpoint as checkpoints
from islandctl.worker import tensors as disk
from islandctl.worker.cell import Cell
from islandctl.worker.checkpoint import TrainingState
from islandctl.worker.data import read_text
from islandctl.worker.links import connect, join, read_all, read_ledger
from islandctl.worker.metrics import Metrics
from islandctl.worker.outcome import Outcome
from islandctl.worker.parallel import Ranks
from islandctl.worker.reporter import Reporter, first_heartbeat, life, registered
from islandctl.worker.wishes import Stopped, Wishes

log = logging.getLogger("islandctl.worker")
SILENT = "the relay does not answer"
BY_SIGNAL = "stopped by a signal"
FAREWELL_S = 60.0
"""How long the end waits for the relay to hear of the last checkpoint. It is on disk in any case."""


class Worker:
    """One rank of one cell."""

    def __init__(self, folder: CellFolder, job: CellJob, wishes: Wishes) -> None:
        self.folder, self.job, self.wishes, self.recipe = folder, job, wishes, job.recipe
        self.checkpoint_folder = Path(folder.checkpoints)
        self.step = 0
        """Inner steps finished."""
        self.tokens = 0
        """Trained by this cell."""
        self.bits_per_byte: list[tuple[int, float]] = []
        """(step, value) of every evaluation."""
        self.rounds: dict[str, int] = {}
        """Counts of rounds, as last told."""
        self.relay: RelayClient | None = None
        self.metrics: Metrics | None = None
        self.closing = ExitStack()
        """What is open, to be closed in reverse."""

    def run(self) -> Outcome:
        """Train to the end or to a stop.

        Raises:
            IslandError: what ended it.
        """
        training, evaluation, every = self.recipe.training, self.recipe.evaluation, self.recipe.checkpoint.every
        self.ranks = Ranks.start(self.job.num_ranks)
        self.closing.callback(self.leave_ranks)
        text = read_text(self.recipe.data, sequence=training.sequence)
        self.held_out_hash = text.held_out_hash
        self.cell = Cell(self.job, self.ranks, text)
        if relay := connect(self.folder, self.recipe.exchange.mode):
            self.relay = self.closing.enter_context(relay)
        if self.ranks.leads:
            self.metrics = Metrics(Path(self.folder.metrics), self.job.attempt)
        self.reporter = Reporter(
            self.relay if self.ranks.leads else None,
            first_heartbeat(self.job, text.held_out_hash),
            num_cells=len(self.job.cells),
            checkpoints=self.checkpoint_folder,
            keep=self.recipe.checkpoint.keep,
            spent=self.wishes.spent if self.ranks.leads else lambda: False,
        )
        self.closing.callback(self.farewell)
        self.island, self.map_hash = join(
            self.folder, self.job, self.cell, self.ranks, self.relay, lambda: self.note("waiting", reason=SILENT)
        )
        self.closing.callback(self.island.close)
        self.wishes.hurry_up(self.island.hurry)
        self.restore()
        if not self.bits_per_byte:
            self.evaluate()

        clock = Clock(self.cell.tokens_per_step)
        reason, _ = self.asked(may_save=False)  # it may have died after the checkpoint that a stop asked for
        self.reporter.update(state="training")
        while self.step < training.steps and not reason:
            result = self.cell.train_step(self.step)
            self.tokens += self.cell.tokens_per_step
            with self.reporter.doing("waiting"):
                self.step = self.island.step(self.cell.tokens_per_step)

            rate = clock.tick()
            self.note("train", **vars(result), tokens=self.tokens, tokens_per_s=round(rate, 1))
            self.reporter.update(step=self.step, tokens=self.tokens, tokens_per_s=rate, loss=result.loss)
            self.note_exchange()
            if self.step == training.steps:
                break
            if self.step % evaluation.every == 0:
                self.evaluate()
            reason, save = self.asked()
            if not reason and (save or self.step % every == 0):
                self.save()

        if not reason:
            with self.reporter.doing("waiting"):
                finished = self.island.finish()
            self.note_exchange()
            reason = "" if finished else self.asked()[0]
        if reason:
            if problem := self.save():
                reason = f"{reason}, but {problem}; a resume begins at the checkpoint before"
            return Outcome.ended("stopped", reason, step=self.step, retry=reason.startswith(BY_SIGNAL))
        self.evaluate()
        if problem := self.save():
            raise CheckpointError(
                f"all {self.step} steps are done, but {problem}",
                hint=f"free space in {self.checkpoint_folder} and run islandctl resume",
            )
        return Outcome.ended("finished", f"all {self.step} steps are done", step=self.step)

    def restore(self) -> None:
        """Take the state from the right checkpoint, if there is one, and catch up with the ledger."""
        entries = read_ledger(self.relay, self.ranks, self.wishes)
        saved = checkpoints.choose(
            self.checkpoint_folder,
            attempt=self.job.attempt,
            cell=self.job.cell,
            entries=entries,
            ranks=self.ranks,
        )
        if saved is not None:
            state = checkpoints.read_state(
                saved.path,
                run=self.job.run,
                config_hash=self.job.config_hash,
                cell=self.job.cell,
                num_ranks=self.ranks.size,
            )
            own = disk.load(saved.path, self.cell.tensors(), saved.files, self.ranks)
            self.cell.restore_random_states(own)
            self.island.load_state_dict(
                {key.removeprefix("island/"): tensor for key, tensor in own.items() if key.startswith("island/")}
            )
            self.cell.sequences.restore(state.cursor)
            self.step, self.tokens, self.bits_per_byte = state.step, state.tokens, list(state.bits_per_byte)
            if saved.attempt == self.job.attempt and not registered(entries, saved, self.job.cell):
                self.reporter.register(saved, state.versions)
            log.info("continuing from %s", saved.path.name)
        try:
            with self.reporter.doing("waiting"):
                self.step = self.island.resume()
        except Hurried as error:
            raise Stopped("stopped by a signal while waiting for the relay") from error
        self.rounds = {key: value for key, value in self.island.metrics().items() if key.startswith("rounds_")}
        self.reporter.update(step=self.step, tokens=self.tokens, bits_per_byte=tuple(self.bits_per_byte[-60:]))
        name = saved.path.name if saved else ""
        self.note("start", checkpoint=name, num_ranks=self.ranks.size, life=life())

    def evaluate(self) -> None:
        """Bits per byte on the held-out text."""
        with self.reporter.doing("evaluating"):
            value = self.cell.evaluate()
        self.bits_per_byte = [each for each in self.bits_per_byte if each[0] != self.step] + [(self.step, value)]
        self.note("eval", bits_per_byte=value)
        self.reporter.update(bits_per_byte=tuple(self.bits_per_byte[-60:]))
        log.info("step %d: %.4f bits per byte", self.step, value)

    def asked(self, *, may_save: bool = True) -> tuple[str, bool]:
        """Why to stop now (empty: go on), and whether a checkpoint is asked for: the same at every rank.

        Raises:
            RelayError: the relay's verdict that this cell must not go on.
        """
        verdict = self.reporter.verdict
        stop_at = self.island.should_stop_at()
        flags = [
            verdict is not None,
            stop_at is not None and self.step >= stop_at,
            self.reporter.stop_heard and self.recipe.exchange.mode == "none",
            self.wishes.stopping,
            may_save and self.ranks.leads and self.wishes.take_save(),
        ]
        judged, stop, alone_stop, signalled, save = self.ranks.agree([int(flag) for flag in flags])
        if judged:
            message, code, hint = self.ranks.tell((verdict.message, verdict.code, verdict.hint) if verdict else None)
            raise RelayError(message, code=code, hint=hint)
        reason = "stopped on request" if stop or alone_stop else BY_SIGNAL if signalled else ""
        return reason, bool(save)

    def save(self) -> str:
        """Write a checkpoint and tell the relay. A full disk costs this checkpoint, not the training.

        Returns:
            What went wrong; empty when nothing did.
        """
        began = time.monotonic()
        state = TrainingState(
            run=self.job.run,
            config_hash=self.job.config_hash,
            map_hash=self.map_hash,
            cell=self.job.cell,
            num_ranks=self.ranks.size,
            attempt=self.job.attempt,
            step=self.step,
            tokens=self.tokens,
            cursor=self.cell.sequences.state(),
            versions=tuple(self.island.versions()),
            held_out_hash=self.held_out_hash,
            bits_per_byte=tuple(self.bits_per_byte),
        )
        own = self.cell.random_states()
        own |= {f"island/{key}": tensor for key, tensor in self.island.state_dict().items()}
        own = {f"rank-{self.ranks.rank}/{key}": tensor for key, tensor in own.items()}
        try:
            with self.reporter.doing("checkpointing"):
                saved = checkpoints.write(self.checkpoint_folder, state, self.cell.tensors() | own, self.ranks)
        except CheckpointError as error:
            message = f"no checkpoint at step {self.step}: {error.message}"
            log.error("%s; the last one stands, and the next is tried as planned (is the disk full?)", message)
            self.note("checkpoint", error=error.message)
            self.reporter.update(message=message)
            return message
        self.note("checkpoint", path=saved.path.name, seconds=round(time.monotonic() - began, 3))
        self.reporter.update(message="")
        self.reporter.register(saved, state.versions)
        log.info("checkpoint %s", saved.path.name)
        return ""

    def note(self, kind: str, **values: Any) -> None:
        """A line in metrics.jsonl, by rank 0."""
        if self.metrics is not None:
            self.metrics.write(kind, self.step, **values)

    def note_exchange(self) -> None:
        """Tell of the rounds when one more is resolved."""
        told = self.island.metrics()
        counts = {key: value for key, value in told.items() if key.startswith("rounds_")}
        if counts != self.rounds:
            self.rounds = counts
            self.note("exchange", **told, versions=self.island.versions())
            self.reporter.update(**counts)

    def halted(self) -> bool:
        """Whether the ledger says that this attempt must not go on. False where the relay does not answer."""
        try:
            entries = read_all(self.relay) if self.relay else []
        except IslandError:
            return False
        return any(isinstance(entry, Halt) and entry.attempt == self.job.attempt for entry in entries)

    def close(self, outcome: Outcome) -> None:
        """End the background work and tell the relay how it ended."""
        self.outcome = outcome
        self.note("end", outcome=outcome.outcome, reason=outcome.reason)
        self.closing.close()

    def farewell(self) -> None:
        """The last heartbeat, and checkpoints that the relay has not heard of."""
        good = self.outcome.outcome != "failed"
        self.reporter.update(state=self.outcome.outcome, message=self.outcome.reason)
        if not self.reporter.close(wait_s=FAREWELL_S if good else 5.0):
            log.warning("the relay has not heard of the end; what it must know lies in %s", self.folder.root)

    def leave_ranks(self) -> None:
        """After a failure the other ranks may never come, and waiting for them would hang."""
        if self.outcome.outcome != "failed":
            self.ranks.close()


class Clock:
    """Tokens per second over the last steps, evaluations and checkpoints included."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._times = deque([time.monotonic()], maxlen=21)

    def tick(self) -> float:
        """One step is done; the present rate."""
        self._times.append(time.monotonic())
        return self._tokens_per_step * (len(self._times) - 1) / max(1e-9, self._times[-1] - self._times[0])
