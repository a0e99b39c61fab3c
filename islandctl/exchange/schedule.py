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
    """

    steps: int
    window: int
    fragments: int
    overlap: int

    @property
    def final_window(self) -> int:
        """The window of the final rounds, ⌈steps/window⌉: the first that no regular round of the run uses."""
        return -(-self.steps // self.window)

    def last_window(self, fragment: int) -> int:
        """The fragment's last regular window, −1 when the run is too short for one."""
        return (self.steps - (fragment + 1) * self.window // self.fragments) // self.window

    def is_final(self, window: int) -> bool:
        """Whether rounds of this window belong to the end of the run."""
        return window >= self.final_window

    def snapshot_step(self, fragment: int, window: int) -> int:
        """The step whose end the round's snapshot is taken at; final rounds begin after the last step."""
        if self.is_final(window):
            return self.steps
        return window * self.window + (fragment + 1) * self.window // self.fragments

    def apply_step(self, fragment: int, window: int) -> int:
        """The step at whose end the round's result is due, at the latest the last one."""
        if self.is_final(window):
            return self.steps
        return min(self.snapshot_step(fragment, window) + self.overlap, self.steps)

    def begins_at(self, step: int) -> Round | None:
        """The round whose snapshot is due at ``step``, if any."""
        window, offset = divmod(step - 1, self.window)
        if step < 1 or step > self.steps:
            return None
        # The smallest p with ⌊(p+1)·W/P⌋ ≥ offset + 1 is the only candidate.
        fragment = -(-(offset + 1) * self.fragments // self.window) - 1
        if (fragment + 1) * self.window // self.fragments != offset + 1:
            return None
        return Round(fragment, window)
