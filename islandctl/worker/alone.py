"""A cell that exchanges nothing (``mode: none``): what the loop asks of an ``Island``, answered for one alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Exchanger(Protocol):
    """What the loop asks of the exchange; ``exchange.island.Island`` is the real one."""

    def step(self, tokens: int) -> int:
        """Once after every inner step, with the cell's tokens in it; gives the step counter.

        Raises what went wrong, on all ranks."""

    def finish(self) -> bool:
        """After the last step: apply what is in flight, then the final rounds. False: broken off to stop."""

    def hurry(self) -> None:
        """The process was asked to end: stand still no more."""

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state, tensors only."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""

    def versions(self) -> tuple[int, ...]:
        """Version of every fragment."""

    def resume(self) -> int:
        """Follow the ledger from the loaded state; gives the step to continue at."""

    @property
    def run_step(self) -> int:
        """The run's step that the cell has reached: where it takes steps of its own another number than theirs."""

    @property
    def warming_up(self) -> bool:
        """The first cell trains alone, and this one must wait for it before it trains."""

    def await_warmup(self) -> int:
        """Wait for the first cell to end its warm-up, or to save; gives the step counter."""

    def metrics(self) -> dict[str, Any]:
        """Counts of rounds so far."""

    def should_stop_at(self) -> int | None:
        """The step at which a stop entry of the ledger takes effect, once it is known."""

    def close(self) -> None:
        """End the background work."""


class Alone:
    """Exchanges nothing. It keeps the step, as an island does."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._step = 0

    def step(self, tokens: int) -> int:
        """Count."""
        self._step += 1
        return self._step

    def finish(self) -> bool:
        """Nothing is in flight."""
        return True

    def hurry(self) -> None:
        """It never stands still."""

    def state_dict(self) -> dict[str, Tensor]:
        """The step."""
        return {"step": Tensor([self._step]).long()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the step."""
        self._step = int(state["step"])

    def versions(self) -> tuple[int, ...]:
        """No fragment ever changes its version."""
        return (0,) * self._num_fragments

    def resume(self) -> int:
        """Where the loaded state was."""
        return self._step

    @property
    def run_step(self) -> int:
        """The same as its own."""
        return self._step

    @property
    def warming_up(self) -> bool:
        """It is the first cell."""
        return False

    def await_warmup(self) -> int:
        """Nobody to wait for."""
        return self._step

    def metrics(self) -> dict[str, Any]:
        """No rounds."""
        return {}

    def should_stop_at(self) -> int | None:
        """A stop takes effect through the reporter."""
        return None

    def close(self) -> None:
        """Nothing to end."""
