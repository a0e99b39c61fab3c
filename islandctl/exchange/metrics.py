"""What the exchange tells of itself. A falling cosine and a growing residual are the first signs of divergence."""

from __future__ import annotations

from typing import Any


class Metrics:
    """Counts over the run, and figures of each fragment's last round.

    ``cosine``: between this cell's contribution and the mean of all; ``norm``: of the pseudo-gradient;
    ``residual``: ‖residual‖ / ‖what was to be sent‖; ``distance``, in a butterfly in the cosine's place: ½‖x̂ⱼ − x̂ᵢ‖,
    by how much partners moved towards each other; ``round_s``: seconds from the snapshot until this rank had the
    result. None: no round yet.
    """

    COUNTERS = ("rounds_applied", "rounds_skipped", "rounds_late")

    def __init__(self, num_fragments: int) -> None:
        self.rounds_applied = 0
        self.rounds_skipped = 0
        """Rounds whose commit did not name this cell."""
        self.rounds_late = 0
        """Rounds resolved after their planned step."""
        self.wait_s = 0.0
        """Seconds that the training loop stood still for commits, in this process."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.cosine: list[float | None] = [None] * num_fragments
        self.norm: list[float | None] = [None] * num_fragments
        self.residual: list[float | None] = [None] * num_fragments
        self.distance: list[float | None] = [None] * num_fragments
        self.round_s: list[float | None] = [None] * num_fragments

    def resolved(self, *, named: bool, late: bool) -> None:
        """Count a round."""
        self.rounds_applied += named
        self.rounds_skipped += not named
        self.rounds_late += late

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in self.COUNTERS}

    def restore(self, counters: dict[str, int]) -> None:
        """Take over what a checkpoint kept."""
        for name in self.COUNTERS:
            setattr(self, name, counters[name])

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return self.counters() | {
            "wait_s": self.wait_s,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "cosine": list(self.cosine),
            "norm": list(self.norm),
            "residual": list(self.residual),
            "distance": list(self.distance),
            "round_s": list(self.round_s),
        }
