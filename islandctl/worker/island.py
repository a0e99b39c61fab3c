"""What ``islandctl.attach`` gives: the exchange, as a training loop of any kind meets it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from islandctl.config.pace import Pace
from islandctl.errors import CheckpointError, UsageError
from islandctl.worker.alone import Exchanger

Aside = Callable[[float], AbstractContextManager[Callable[[float], None]]]
TOKENS = "tokens"
STOPPED = "stopped on request"


def check_whole(what: str, value: Any, least: int) -> int:
    """The number itself, plain.

    Raises:
        UsageError: it is not whole, or less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise UsageError(f"{what} must be a whole number, not {value!r}") from error
    if number < least:
        raise UsageError(f"{what} must be at least {least}, not {number}")
    return number


def check_number(name: str, value: Any) -> float:
    """The figure, plain.

    Raises:
        UsageError: it is no single number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for a tensor of several numbers
        raise UsageError(
            f"island.step(): {name} must be a single number, not a {type(value).__name__}",
            hint=f"for example {name}={name}.mean().item()",
        ) from error


@contextmanager
def _nobody_else(made: float) -> Iterator[Callable[[float], None]]:
    """This process has one cell."""
    yield lambda made: None


class Island:
    """One cell of a run, attached to a training loop::

        for step in island.steps():
            ...                     # forward, backward, optimizer.step()
            island.step(loss=loss.item())
        island.finish()

    Args:
        exchanger: the exchange.
        num_steps: inner steps of the run, as the recipe has them.
        pace: the cell's own steps against these.
        tokens_per_step: what ``step`` counts when it is not told; None: it must be told.
        aside: entered with the steps made while the loop is in the exchange, where it may wait for other cells of
            this process; gives what to call with the steps made before it comes back.
        at_begin: called before the first step, after any state was loaded.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        *,
        num_steps: int,
        pace: Pace,
        tokens_per_step: int | None = None,
        aside: Aside | None = None,
        at_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_steps = pace.own_step(num_steps)
        """Inner steps of this cell."""
        self.pace = pace
        """Its own steps against the run's."""
        self.done = 0
        """Inner steps done."""
        self.tokens = 0
        """Trained by this cell so far."""
        self.stopping = ""
        """Why the loop is to end before the last step; empty: it is not."""
        self.evaluated: list[tuple[int, float]] = []
        """(step, bits per byte) of every evaluation so far."""
        self._exchanger = exchanger
        self._tokens_per_step = tokens_per_step
        self._aside = aside or _nobody_else
        self._at_begin = at_begin
        self._begun = self._stepped = self._finished = False
        self._loop: object | None = None
        """The one that runs now; None: the caller steps by hand."""

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 0 or where the state was left, to the end or a wish to stop.

        A number is that of the steps done before. It may leave some out: a cell that was away, or slower while the
        relay was away, takes over what the others have done.

        Raises:
            UsageError: the loop's body did not call ``step``.
        """
        self._begin()
        mine = self._loop = object()
        try:
            while self.done < self.num_steps and not self.stopping:
                before, self._stepped = self.done, False
                yield before
                if self.done == before:
                    raise UsageError(
                        f"island.step() was not called in step {before + 1}",
                        hint="call it once in every pass of `for step in island.steps()`, after optimizer.step()",
                    )
                if self.done < self.num_steps:
                    self._between()
        finally:  # also when the loop was left by `break`: what comes then is no pass of it
            if self._loop is mine:
                self._loop = None

    def step(self, tokens: int | None = None, **figures: float) -> int:
        """One inner step is done: exchange what is due. All ranks of the cell call it together.

        Args:
            tokens: that the whole cell has trained in this step; left out: the recipe's batch × sequence, or what
                ``attach`` was told.
            figures: to be noted, for example ``loss``. Single numbers.

        Returns:
            The steps done now.

        Raises:
            UsageError: after ``finish`` or the last step; twice in one pass of ``steps``; ``tokens`` is not known,
                or no number of tokens; a figure is no single number.
            CheckpointError: of the first step: what was loaded does not fit the other cells.
            ExchangeError: a round cannot be carried out; a parameter holds a value that is not finite.
            DivergenceError: the cells do not hold the same anchors.
        """
        if self._finished:
            raise UsageError("island.step() after island.finish()", hint="finish() belongs behind the loop")
        if self.done >= self.num_steps:
            raise UsageError(f"island.step() after the last of {self.num_steps} steps", hint="use island.steps()")
        if self._loop is not None and self._stepped:
            raise UsageError(
                f"island.step() was called twice in step {self.done}",
                hint="call it once in every pass of `for step in island.steps()`, after optimizer.step()",
            )
        counted = self._tokens_per_step if tokens is None else tokens
        if counted is None:
            raise UsageError(
                "island.step(): how many tokens?", hint="island.step(tokens=…), or attach(…, tokens_per_step=…)"
            )
        counted = check_whole("island.step(): tokens", counted, 0)
        for name, value in figures.items():
            check_number(name, value)
        self._begin()
        self.tokens += counted
        with self._aside(self.pace.position(self.done + 1)) as come_back:
            self.done = self._exchanger.step(counted)
            come_back(self.pace.position(self.done))
        self._stepped = True
        return self.done

    def is_due(self, every: int) -> bool:
        """Whether the last step has reached a multiple of ``every`` of the run's steps: the time to evaluate, or to
        print. Cells that take unequal numbers of steps do so together.

        Raises:
            UsageError: ``every`` is no whole number, or less than 1.
        """
        every = check_whole("island.is_due(): every", every, 1)
        return self.done > 0 and self.pace.run_step(self.done) // every > self.pace.run_step(self.done - 1) // every

    def finish(self) -> bool:
        """After the loop: what is in flight is applied, and all cells exchange once more and end with equal bits.

        When the run is to stop before its last step, there is nothing to apply. The exchange is closed.

        Returns:
            False: the run stops before its end.

        Raises:
            UsageError: steps are left, and nobody wishes to stop.
        """
        self._check_end()
        finished = False
        if not self.stopping:
            with self._aside(math.inf):
                finished = self._exchanger.finish()
            self.stopping = "" if finished else STOPPED
        self._finished = True
        self.close()
        return finished

    def evaluate(self, bits_per_byte: Callable[[], float]) -> float:
        """Call the function, and note what it gives as bits per byte on held-out text at this step.

        Raises:
            UsageError: it gives no number.
        """
        try:
            value = float(bits_per_byte())
        except (TypeError, ValueError) as error:
            raise UsageError(f"island.evaluate(): the function must give one number: {error}") from error
        self.evaluated = [each for each in self.evaluated if each[0] != self.done] + [(self.done, value)]
        return value

    def state_dict(self) -> dict[str, Tensor]:
        """What the exchange must remember, tensors only. Model and optimizer are the caller's to save with it."""
        return self._exchanger.state_dict() | {TOKENS: torch.tensor(self.tokens)}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` gave, before the first step. Model and optimizer are loaded by the caller.

        Raises:
            UsageError: after the first step.
            CheckpointError: it belongs to another model or cell.
        """
        if TOKENS not in state_dict:
            raise CheckpointError("island.load_state_dict(): this is not what island.state_dict() has given")
        if self._begun:
            raise UsageError("island.load_state_dict() after the first step", hint="load it right after attach()")
        self.tokens = int(state_dict[TOKENS])
        self._exchanger.load_state_dict({key: value for key, value in state_dict.items() if key != TOKENS})
        self.done = self.pace.own_step(self._exchanger.run_step)

    def metrics(self) -> dict[str, Any]:
        """Rounds and bytes so far, and each fragment's last figures."""
        return self._exchanger.metrics()

    def close(self) -> None:
        """End the background work. ``finish`` does it; needed only where a loop is given up before."""
        self._exchanger.close()

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Before the first step: follow the ledger to where this cell stands."""
        if not self._begun:
            self._begun = True
            self._at_begin()
            with self._aside(self.pace.position(self.done)) as come_back:
                self.done = self._exchanger.resume()
                come_back(self.pace.position(self.done))
            while self._exchanger.warming_up:
                with self._aside(math.inf) as come_back:
                    self.done = self._exchanger.await_warmup()
                    come_back(self.pace.position(self.done))

    def _between(self) -> None:
        """Between two steps."""
        stop_at = self._exchanger.should_stop_at()
        if stop_at is not None and self.done >= stop_at:
            self.stopping = STOPPED

    def _check_end(self) -> None:
        if self._finished:
            raise UsageError("island.finish() for the second time")
        if self.done < self.num_steps and not self.stopping:
            raise UsageError(
                f"island.finish() after {self.done} of {self.num_steps} steps: the other cells would wait in vain",
                hint="leave the loop only when island.steps() ends",
            )
