"""What cells and controller tell the relay, and what it answers."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from islandctl.config.model import Model
from islandctl.ledger.joint import JointCheckpoint

__all__ = ["HEARTBEAT_S", "UNSAVED", "CellStatus", "Heartbeat", "JointCheckpoint", "RelayStatus"]

HEARTBEAT_S = 2.0
"""How often a cell gives a sign of life."""
UNSAVED = "no checkpoint at step"
"""So begins the message of a cell whose last checkpoint could not be written."""


class Heartbeat(Model):
    """A cell's short sign of life, sent by its rank 0. The relay keeps the last one of each cell.

    A loss may be infinite or no number; JSON then holds ``Infinity`` or ``NaN``, as Python reads and writes them.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    attempt: int
    cell: int
    state: Literal["starting", "training", "waiting", "evaluating", "checkpointing", "finished", "stopped", "failed"]
    step: int
    """The cell's own number, as all steps here."""
    steps: int
    """That it takes in the whole run."""
    tokens: int
    """Tokens trained by this cell so far."""
    tokens_per_s: float
    """Recent mean."""
    loss: float | None = None
    """Training loss of the last step, nats per token."""
    bits_per_byte: tuple[tuple[int, float], ...] = ()
    """(step, held-out bits per byte), newest last, at most 60."""
    held_out_hash: str = ""
    """Hash of the held-out text; must be the same in all cells."""
    rounds_applied: int = 0
    rounds_skipped: int = 0
    """Rounds whose commit did not name this cell."""
    rounds_late: int = 0
    """Rounds resolved after their planned step."""
    message: str = ""
    """One line for the user, for example what it waits for."""
    spent: bool = False
    """The budget is used up: all cells are to checkpoint and end together."""
    life: str = ""
    """The life of the workers that says this, as their supervisor counts (ISLANDCTL_LIFE); empty: not known."""


class CellStatus(Model):
    """One cell, as the relay sees it."""

    cell: int
    name: str
    heartbeat: Heartbeat | None = None
    age_s: float | None = None
    """Seconds since the last heartbeat; None: never heard of."""
    still_s: float | None = None
    """Seconds since a heartbeat first told the present step; None: never heard of."""
    away: bool = False
    """The late policy counts this cell as gone."""
    packets: int = 0
    """Taken in since this relay was started; bytes the same."""
    bytes_up: int = 0
    bytes_down: int = 0


class RelayStatus(Model):
    """The relay's whole view of the run."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    run: str
    config_hash: str
    attempt: int
    ledger_seq: int
    ledger_hash: str
    cells: tuple[CellStatus, ...]
    rounds_committed: int = 0
    """Commits of this attempt that name at least one cell."""
    rounds_empty: int = 0
    rounds_partial: int = 0
    """Commits that name some cells but not all."""
    rounds_open: int = 0
    last_commit: dict[str, int] | None = None
    """fragment, window, seq."""
    joint_checkpoints: tuple[JointCheckpoint, ...] = Field(default=())
    """Oldest first."""
    halted: str = ""
    """The reason, when a halt entry of this attempt exists."""
    stopping: bool = False
