"""What one training run of the experiment depends on. Two runs with equal settings have equal results."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from islandctl.config.codec import CodecName, Rounding
from islandctl.config.recipe import STDLIB
from islandctl.ledger.packet import canonical_json

VERSION = 3
"""Of what the settings mean: raised when a default changes, or what the code makes of given settings."""


class Frozen(BaseModel):
    """Values that never change; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Model(Frozen):
    """The decoder. The default has 23,000 parameters: 1,000 steps of 8,192 bytes take 40 s of one core."""

    layers: int = 2
    width: int = 16
    heads: int = 1
    hidden: int = 16
    experts: int = 8
    active: int = 2
    sequence: int = 32
    balance: float = 0.01


class Inner(Frozen):
    """The optimizer inside a cell: the same fields for every arm."""

    kind: Literal["adamw", "shampoo"] = "adamw"
    lr: float = 1e-2
    refresh: int = 20
    """Of Shampoo's roots, in steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: float = 0.05
    """Share of the steps in which the rate rises from 0."""
    final: float = 0.0
    """Share of the peak rate that the cosine ends at."""


class Anchored(Frozen):
    """The two-site exchange: all cells share one anchor."""

    kind: Literal["anchor"]
    window: int = 50
    fragments: int = 2
    overlap: int = 5
    codec: CodecName = "int4"
    rounding: Rounding | None = None
    """None: the codec's usual one."""
    feedback: float | None = None
    """β: the share of the residual that goes with the next packet; 0: no error feedback; None: the codec's usual."""
    apply: Literal["carry", "blend"] = "carry"
    alpha: float = 0.5
    outer_lr: float = 1.0
    outer_momentum: float = 0.4


class Butterfly(Frozen):
    """2^k cells mix in pairs, no shared anchor."""

    kind: Literal["butterfly"]
    window: int = 4
    fragments: int = 2
    overlap: int = 0
    codec: CodecName = "bf16"
    rounding: Rounding | None = None
    feedback: float | None = None


class Run(Frozen):
    """One training run."""

    model: Model = Model()
    inner: Inner = Inner()
    steps: int = 1000
    batch: int = 256
    """Sequences per step over all cells together."""
    cells: int = 1
    joint: int = 0
    """The first steps, in which all cells take one ordinary step together (the joint warm-up)."""
    alone: bool = False
    """In the first ``joint`` steps one cell trains by itself, on its own share of the batch; it then seeds all."""
    exchange: Anchored | Butterfly | None = Field(default=None, discriminator="kind")
    """None: ordinary training of one cell."""
    text: str = STDLIB
    """Files or folders, as the recipe's ``data.paths``; or Python's own sources."""
    held_out: int = 2048
    """Sequences of held-out text."""
    seed: int = 0

    def told(self) -> dict[str, Any]:
        """All that differs from the defaults; ``Run.model_validate`` takes it back."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def key(self) -> str:
        """Hash of the settings, the name of the result's file. A new setting with a default keeps old names."""
        return hashlib.sha256(canonical_json({"version": VERSION} | self.told())).hexdigest()[:16]
