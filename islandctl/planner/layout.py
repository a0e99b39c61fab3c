"""How a cell's ranks share one model."""

from __future__ import annotations

from islandctl.config.model import Model


class Layout(Model):
    """Ways to divide, multiplied: every rank is in one group of each. The worker runs ``fsdp`` alone."""

    fsdp: int = 1
    """Ranks that share the weights and have sequences of their own."""
    tensor: int = 1
    """Ranks that share every matrix; they talk in every block, so they belong on one node."""
    pipeline: int = 1
    """Stages of consecutive blocks."""
    expert: int = 1
    """Of the ``fsdp`` ranks, how many share the experts of a block without gathering them."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.fsdp * self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"FSDP {self.fsdp}"]
        parts += [f"tensor {self.tensor}"] * (self.tensor > 1)
        parts += [f"expert {self.expert}"] * (self.expert > 1)
        parts += [f"pipeline {self.pipeline}"] * (self.pipeline > 1)
        return " × ".join(parts)
