"""The island of a launched run: the exchange, and all that a run needs around a training loop.

Heartbeats, figures, wishes to stop, joint checkpoints, and the way back after any end. The built-in loop and a
user's own script get the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from islandctl.errors import CheckpointError, IslandError, RelayError, UsageError
from islandctl.exchange.island import Hurried
from islandctl.ledger.entries import Halt
from islandctl.relay.client import RelayClient
from islandctl.relay.messages import UNSAVED
from islandctl.worker.island import STOPPED, Island, check_number
from islandctl.worker.keeper import Keeper
from islandctl.worker.links import connect, join, read_all, read_ledger, same_model
from islandctl.worker.metrics import Metrics, peak_memory
from islandctl.worker.objects import Stateful
from islandctl.worker.outcome import Outcome
from islandctl.worker.parallel import Ranks
from islandctl.worker.process import Process
from islandctl.worker.reporter import Reporter, first_heartbeat, life
from islandctl.worker.trained import Model, Trained
from islandctl.worker.wishes import Stopped

log = logging.getLogger("islandctl.worker")
RESERVED = {"attempt", "kind", "peak_bytes", "step", "time", "tokens_per_s", "window"}
"""What a line of metrics.jsonl has in any case."""
WARMUP = "the first cell's warm-up"
SILENT = "the relay does not answer"
BY_SIGNAL = "stopped by a signal"
FAREWELL_S = 60.0
"""How long the end waits for the relay to hear of the last checkpoint. It is on disk in any case."""


class Session(Island):
    """One rank of one launched cell.

    Args:
        process: what was launched.
        model, optimizer, state, held_out_hash: see ``attach``.

    Raises:
        IslandError: as ``attach``; and everything that a run can fail with at its start.
        Stopped: a signal came while it waited for the relay.
    """

    def __init__(
        self, process: Process, model: Model, optimizer: Any, state: Mapping[str, Stateful], held_out_hash: str
    ) -> None:
        self._closing = ExitStack()
        """What is open, to be closed in reverse."""
        self._outcome = Outcome.ended("stopped", "", step=0)
        self._job, self._wishes, self._folder = process.job, process.wishes, process.folder
        self._recipe = process.job.recipe
        self._checkpoints = Path(self._folder.checkpoints)
        self._metrics: Metrics | None = None
        self._relay: RelayClient | None = None
        self._rounds: dict[str, int] = {}
        self.done = 0

        if process.session is not None:
            raise UsageError("attach: for the second time in this process")
        self._trained = Trained(model, optimizer, state)
        self._ranks = process.ranks = process.ranks or Ranks.joined(self._job.num_ranks, self._trained.device)
        process.session = self
        self._pulse = process.pulse
        self._pulse.beat("starting")
        self._closing.callback(self._leave_ranks)
        if relay := connect(self._folder, self._recipe.exchange.mode):
            self._relay = self._closing.enter_context(relay)
        if self._ranks.leads:
            self._metrics = Metrics(Path(self._folder.metrics), self._job.attempt)
            self._closing.callback(self._metrics.close)
        self._reporter = Reporter(
            self._relay if self._ranks.leads else None,
            first_heartbeat(self._job, held_out_hash),
            num_cells=len(self._job.cells),
            checkpoints=self._checkpoints,
            keep=self._recipe.checkpoint.keep,
            spent=self._wishes.spent if self._ranks.leads else lambda: False,
            pulse=process.pulse,
        )
        self._closing.callback(self._farewell)
        exchanger, map_hash = join(
            self._folder,
            self._job,
            self._trained.parameters,
            self._ranks,
            self._relay,
            lambda: self._note("waiting", reason=SILENT),
            process.pulse.beat,
        )
        self._closing.callback(exchanger.close)
        self._keeper = Keeper(
            self._checkpoints,
            self._job,
            self._ranks,
            self._trained,
            exchanger,
            self._reporter,
            map_hash=map_hash,
            held_out_hash=held_out_hash,
        )
        training = self._recipe.training
        per_step = training.batch * training.sequence
        super().__init__(exchanger, num_steps=training.steps, pace=self._job.pace, tokens_per_step=per_step)
        self._wishes.hurry_up(exchanger.hurry)
        self._restore()
        self._clock = Clock(self.tokens)

    def _restore(self) -> None:
        """Take the state from the right checkpoint, if there is one, and catch up with the ledger."""
        entries = read_ledger(self._relay, self._ranks, self._wishes)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self._trained.parameters.items()]
        same_model(self._relay, self._ranks, self._wishes, self._job.attempt, shapes)
        found = self._keeper.restore(entries)
        if found is not None:
            state = found[1]
            self.done, self.tokens = self.pace.own_step(state.step), state.tokens
            self.evaluated = list(state.bits_per_byte)
        try:
            with self._reporter.doing("waiting"):
                self.done = self._exchanger.resume()
        except Hurried as error:
            raise Stopped("stopped by a signal while waiting for the relay") from error
        self._rounds = {key: value for key, value in self.metrics().items() if key.startswith("rounds_")}
        self._reporter.update(step=self.done, tokens=self.tokens, bits_per_byte=tuple(self.evaluated[-60:]))
        name = found[0].path.name if found else ""
        self._note("start", checkpoint=name, num_ranks=self._ranks.size, life=life())

    # The loop's calls

    def step(self, tokens: int | None = None, **figures: float) -> int:
        """See ``Island.step``.

        Raises:
            UsageError: also outside of ``for step in island.steps()``, which looks after checkpoints and stops.
        """
        if self._loop is None:
            raise UsageError(
                "island.step() outside of `for step in island.steps()`",
                hint="that loop begins where the checkpoint ends, and saves and stops when it is time",
            )
        told = {name: check_number(name, value) for name, value in figures.items()}
        if taken := told.keys() & RESERVED:
            raise UsageError(f"island.step(): '{min(taken)}' is noted already", hint="give the figure another name")
        began = time.monotonic()
        with self._reporter.doing("waiting"):
            done = super().step(tokens)
        rate = self._clock.tick(self.tokens, stood_s=time.monotonic() - began)
        peak = peak_memory(self._ranks.device)
        self._note("train", **told, tokens=self.tokens, tokens_per_s=round(rate, 1), peak_bytes=peak)
        self._reporter.update(step=done, tokens=self.tokens, tokens_per_s=rate, loss=told.get("loss"))
        self._note_exchange()
        return done

    def evaluate(self, bits_per_byte: Callable[[], float]) -> float:
        """See ``Island.evaluate``. All ranks call it together."""
        with self._reporter.doing("evaluating"):
            value = super().evaluate(bits_per_byte)
        self._note("eval", bits_per_byte=value)
        self._reporter.update(bits_per_byte=tuple(self.evaluated[-60:]))
        if self._ranks.leads:
            log.info("step %d: %.4f bits per byte", self.done, value)
        return value

    def finish(self) -> bool:
        """See ``Island.finish``. The last checkpoint is written, or the one that a resume begins at.

        Raises:
            CheckpointError: all steps are done, but no checkpoint could be written.
        """
        self._check_end()
        if not self.stopping:
            with self._reporter.doing("waiting"):
                finished = self._exchanger.finish()
            self._note_exchange()
            if not finished:
                self.stopping = self._asked()[0]
        self._finished = True
        problem = self._save()
        self._pulse.rest()
        if not self.stopping:
            if problem:
                raise CheckpointError(
                    f"all {self.done} steps are done, but {problem}",
                    hint=f"free space in {self._checkpoints} and run islandctl resume",
                )
            return True
        if problem:
            self.stopping = f"{self.stopping}, but {problem}; a resume begins at the checkpoint before"
        return False

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Not here: ``attach`` has loaded the right checkpoint.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "island.load_state_dict() in a launched run, which keeps its own checkpoints",
            hint="islandctl resume RUN --from STEP goes back to an older one",
        )

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.stopping, _ = self._asked(may_save=False)  # it may have died after the checkpoint that a stop wants
            while self._exchanger.warming_up and not self.stopping:
                self._await_warmup()
            self._reporter.update(state="training", message="")
            self._trained.begin()
            self._clock = Clock(self.tokens)

    def _await_warmup(self) -> None:
        """The first cell trains alone: wait until its values are here, or it has saved; then save as well."""
        self._note("waiting", reason=WARMUP)
        self._reporter.update(message=f"waits for {WARMUP}")
        before = self.done
        with self._reporter.doing("waiting"):
            self.done = self._exchanger.await_warmup()
        self._reporter.update(step=self.done)
        self._note_exchange()
        self.stopping, save = self._asked()
        # A joint checkpoint takes all cells. Where the seed is, the first cell saves when one is due.
        due = self._exchanger.warming_up and self.done > before
        if not self.stopping and (save or due or self._save_is_due()):
            self._save()

    def _between(self) -> None:
        self.stopping, save = self._asked()
        if not self.stopping and (save or self._save_is_due()):
            self._save()

    def _save_is_due(self) -> bool:
        """At the step at which all cells save. Of a cell's several steps in one of the run's it is the first."""
        step = self._exchanger.run_step
        return step % self._recipe.checkpoint.every == 0 and self.pace.reaches(step, self.done)

    # Stops and checkpoints

    def _asked(self, *, may_save: bool = True) -> tuple[str, bool]:
        """Why to stop now (empty: go on), and whether a checkpoint is asked for: the same at every rank.

        Raises:
            RelayError: the relay's verdict that this cell must not go on.
        """
        verdict = self._reporter.verdict
        stop_at = self._exchanger.should_stop_at()
        flags = [
            verdict is not None,
            stop_at is not None and self.done >= stop_at,
            self._reporter.stop_heard and self._recipe.exchange.mode == "none",
            self._wishes.stopping,
            may_save and self._ranks.leads and self._wishes.take_save(),
        ]
        judged, stop, alone_stop, signalled, save = self._ranks.agree([int(flag) for flag in flags])
        if judged:
            message, code, hint = self._ranks.tell((verdict.message, verdict.code, verdict.hint) if verdict else None)
            raise RelayError(message, code=code, hint=hint)
        reason = STOPPED if stop or alone_stop else BY_SIGNAL if signalled else ""
        return reason, bool(save)

    def _save(self) -> str:
        """Write a checkpoint and tell the relay. A full disk costs this checkpoint, not the training.

        Returns:
            What went wrong; empty when nothing did.
        """
        began = time.monotonic()
        try:
            with self._reporter.doing("checkpointing"):
                saved = self._keeper.write(self._exchanger.run_step, self.tokens, self.evaluated)
        except CheckpointError as error:
            message = f"{UNSAVED} {self._exchanger.run_step}: {error.message}"
            log.error("%s; the last one stands, and the next is tried as planned (is the disk full?)", message)
            self._note("checkpoint", error=error.message)
            self._reporter.update(message=message)
            return message
        self._note("checkpoint", path=saved.path.name, seconds=round(time.monotonic() - began, 3))
        self._reporter.update(message="")
        return ""

    # What is told

    def _note(self, kind: str, **values: Any) -> None:
        """A line in metrics.jsonl, by rank 0."""
        if self._metrics is not None:
            if self._job.window is not None:
                values["window"] = self.pace.windows(self.done)
            self._metrics.write(kind, self.done, **values)

    def _note_exchange(self) -> None:
        """Tell of the rounds when one more is resolved."""
        told = self.metrics()
        counts = {key: value for key, value in told.items() if key.startswith("rounds_")}
        if counts != self._rounds:
            self._rounds = counts
            self._note("exchange", **told, versions=self._exchanger.versions())
            self._reporter.update(**counts)

    # The end

    def halted(self) -> bool:
        """Whether the ledger says that this attempt must not go on. False where the relay does not answer."""
        try:
            entries = read_all(self._relay) if self._relay else []
        except IslandError:
            return False
        return any(isinstance(entry, Halt) and entry.attempt == self._job.attempt for entry in entries)

    def outcome(self) -> Outcome:
        """How it ended, after a loop that raised nothing."""
        if self.stopping:
            return Outcome.ended("stopped", self.stopping, step=self.done, retry=self.stopping.startswith(BY_SIGNAL))
        return Outcome.ended("finished", f"all {self.done} steps are done", step=self.done)

    @property
    def ended(self) -> bool:
        """``finish`` has been called."""
        return self._finished

    def leave(self, outcome: Outcome) -> None:
        """End the background work and tell the relay how it ended. Once, at the process's end."""
        self._outcome = outcome
        self._note("end", outcome=outcome.outcome, reason=outcome.reason)
        self._closing.close()

    def close(self) -> None:
        """Nothing: the process's end does it, in the right order."""

    def _farewell(self) -> None:
        """The last heartbeat, and checkpoints that the relay has not heard of."""
        good = self._outcome.outcome != "failed"
        self._reporter.update(state=self._outcome.outcome, message=self._outcome.reason)
        if not self._reporter.close(wait_s=FAREWELL_S if good else 5.0):
            log.warning("the relay has not heard of the end; what it must know lies in %s", self._folder.root)

    def _leave_ranks(self) -> None:
        """After a failure the other ranks may never come, and waiting for them would hang."""
        if self._outcome.outcome != "failed":
            self._ranks.close()


class Clock:
    """Tokens per second over the last steps, evaluations, checkpoints and the usual waiting for rounds included.

    A wait that is several times longer than any lately is none of that: the relay was away. It is left out, or the
    rate, and with it the ETA, would be wrong until it is forgotten.
    """

    UNUSUAL = 3.0

    def __init__(self, tokens: int, now: float | None = None) -> None:
        self._marks = deque([(time.monotonic() if now is None else now, tokens)], maxlen=21)
        self._stood: deque[float] = deque(maxlen=500)

    def tick(self, tokens: int, *, stood_s: float = 0.0, now: float | None = None) -> float:
        """So many tokens are trained now; the present rate.

        Args:
            stood_s: how long the loop was in the exchange since the last tick.
            now: on the monotonic clock; left out: now.
        """
        if self._stood and stood_s > self.UNUSUAL * max(self._stood):
            self._marks = deque(((at + stood_s, trained) for at, trained in self._marks), maxlen=21)
        self._stood.append(stood_s)
        self._marks.append((time.monotonic() if now is None else now, tokens))
        (began, before), (end, _) = self._marks[0], self._marks[-1]
        return (tokens - before) / max(1e-9, end - began)
