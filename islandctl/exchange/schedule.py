"""Which round begins and ends at which step: arithmetic only. Steps are counted after the inner optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One fragment's exchange in one window."""

    fragment: int
    window: int


@dataclass(frozen=True)
class Schedule:
    """The rounds of a run.

    Args:
        steps: inner steps of the whole run.
        window: inner steps in which every fragment is exchanged once.
        fragments: fragments, at most ``window``, so that at most one round begins per step.
        overlap: steps between snapshot and apply, fewer than ``window``.
        warmup: steps that the first cell trains alone, fewer than ``steps``. If there are any, window 0 is the seed:
            at their end the first cell's values go to all others, every fragment at once. Regular windows follow,
            from 1 on.
    """

    steps: int
    window: int
    fragments: int
    overlap: int
    warmup: int = 0

    @property
    def first_window(self) -> int:
        """The first regular window."""
        return 1 if self.warmup else 0

    @property
    def final_window(self) -> int:
        """The window of the final rounds: the first that no regular round of the run uses."""
        return self.first_window - (self.warmup - self.steps) // self.window

    def last_window(self, fragment: int) -> int:
        """The fragment's last regular window, one less than the first when the run is too short for any."""
        offset = (fragment + 1) * self.window // self.fragments
        return self.first_window + (self.steps - self.warmup - offset) // self.window

    def is_seed(self, window: int) -> bool:
        """Whether rounds of this window bring the first cell's values to the others."""
        return window < self.first_window

    def is_final(self, window: int) -> bool:
        """Whether rounds of this window belong to the end of the run."""
        return window >= self.final_window

    def is_whole(self, window: int) -> bool:
        """Whether values go as they are and nobody trains meanwhile: the seed and the final rounds."""
        return self.is_seed(window) or self.is_final(window)

    def snapshot_step(self, fragment: int, window: int) -> int:
        """The step whose end the round's snapshot is taken at; final rounds begin after the last step."""
        if self.is_final(window):
            return self.steps
        if self.is_seed(window):
            return self.warmup
        begins = self.warmup + (window - self.first_window) * self.window
        return begins + (fragment + 1) * self.window // self.fragments

    def apply_step(self, fragment: int, window: int) -> int:
        """The step at whose end the round's result is due, at the latest the last one."""
        if self.is_final(window):
            return self.steps
        overlap = 0 if self.is_seed(window) else self.overlap
        return min(self.snapshot_step(fragment, window) + overlap, self.steps)

    def seeds_at(self, step: int) -> bool:
        """Whether the first cell's warm-up ends at ``step``."""
        return 0 < step == self.warmup

    def begins_at(self, step: int) -> Round | None:
        """The regular round whose snapshot is due at ``step``, if any."""
        window, offset = divmod(step - self.warmup - 1, self.window)
        if step <= self.warmup or step > self.steps:
            return None
        # The smallest p with ⌊(p+1)·W/P⌋ ≥ offset + 1 is the only candidate.
        fragment = -(-(offset + 1) * self.fragments // self.window) - 1
        if (fragment + 1) * self.window // self.fragments != offset + 1:
            return None
        return Round(fragment, self.first_window + window)
