"""A cell that exchanges nothing (``mode: none``): what the loop asks of an ``Island``, answered for one alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Exchanger(Protocol):
    """What the loop asks of the exchange; ``exchange.island.Island`` is the real one."""

    def step(self, tokens: int) -> None:
        """Once after every inner step, with the cell's tokens in it. Raises what went wrong, on all ranks."""

    def finish(self) -> None:
        """After the last step: apply what is in flight, then the final rounds."""

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state, tensors only."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""

    def versions(self) -> tuple[int, ...]:
        """Version of every fragment."""

    def resume(self) -> int:
        """Follow the ledger from the loaded state; gives the step to continue at."""

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

    def step(self, tokens: int) -> None:
        """Count."""
        self._step += 1

    def finish(self) -> None:
        """Nothing is in flight."""

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

    def metrics(self) -> dict[str, Any]:
        """No rounds."""
        return {}

    def should_stop_at(self) -> int | None:
        """A stop takes effect through the reporter."""
        return None

    def close(self) -> None:
        """Nothing to end."""
