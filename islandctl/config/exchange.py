"""The recipe's section ``exchange``: how the cells exchange fragments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from islandctl.config.codec import FACTS, CodecName, Rounding, block_trouble, rounding_trouble
from islandctl.config.model import Settings
from islandctl.config.placement import PlacementRule
from islandctl.config.units import Deadline, Share, Steps


class Outer(Settings):
    """The optimizer that moves the anchor. A butterfly has no anchor, and uses none of it."""

    kind: Literal["nesterov", "average", "delayed"] = "nesterov"
    """``nesterov``: SGD with Nesterov momentum. ``average``: the mean of the cells' values. ``delayed``: Nesterov
    whose momentum moves only every ``delay`` rounds of a fragment, for rounds that mostly name one cell."""
    lr: float | None = Field(default=None, gt=0, le=10)
    """Left out: 0.7, with momentum 0.9 DiLoCo's published pair. Not for ``average``."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Left out: 0.9. Not for ``average``."""
    delay: int | None = Field(default=None, ge=1, le=1_000_000)
    """For ``delayed``: rounds of a fragment between two moves of its momentum."""

    @model_validator(mode="after")
    def _consistent(self) -> Outer:
        if self.kind == "average" and (self.lr is not None or self.momentum is not None):
            key = "momentum" if self.lr is None else "lr"
            raise self.contradiction("kind: average takes neither lr nor momentum: it is the plain mean", key)
        if self.kind == "delayed" and self.delay is None:
            raise self.contradiction("kind: delayed needs delay", "kind")
        if self.kind != "delayed" and self.delay is not None:
            raise self.contradiction(f"kind: {self.kind} takes no delay", "delay")
        return self


class Late(Settings):
    """What happens when a cell's packet does not come."""

    deadline: Deadline = 600.0
    """After a round's first packet; then the round is committed empty."""
    relay_away: Deadline = 60.0
    """So long a cell stands still for a silent relay; then it trains on. A restarted relay is back sooner."""
    windows: int = Field(default=2, ge=1)
    """After so many windows without a cell, ``then`` decides."""
    then: Literal["wait", "alone"] = "wait"
    """``wait``: rounds stay open until the cell is back. ``alone``: the others go on; it rejoins later."""


class Exchange(Settings):
    """How the cells exchange fragments."""

    mode: Literal["two-site", "butterfly", "none"] = "two-site"
    """``two-site``: all cells share one anchor. ``butterfly``: 2^k cells mix in pairs. ``none``: one cell alone."""
    cells: int | None = Field(default=None, ge=1)
    """Cells over all sites; left out: one a site."""
    window: Steps = 50
    """Inner steps in which every fragment is exchanged once."""
    fragments: int = Field(default=4, ge=1)
    """Parts of the model, exchanged one after another over the window."""
    placement: PlacementRule = "strided"
    """``strided``: the model's blocks go to fragments in turn. ``consecutive``: in runs of neighbours. ``balanced``:
    so that fragments are about equal bytes on the wire, for models whose embedding is as heavy as blocks."""
    warmup: int = Field(default=0, ge=0, le=1_000_000_000)
    """Steps that the first cell trains alone, while the others wait; then its values are sent to them once, exact,
    and all train on from there. 0: none."""
    pace: Literal["equal", "measured"] = "equal"
    """``equal``: every cell takes ``window`` steps a window. ``measured``: each its own number of them, by its speed,
    so that all end a window together; ``window`` at the mean speed."""
    pace_bound: float | None = Field(default=None, ge=1, le=16)
    """For ``measured``: no cell takes more than ``window`` times this, or less than ``window`` divided by it. Left
    out: 2, so that of two cells none trains more than four times as long as the other between two exchanges."""
    overlap: int = Field(default=5, ge=0)
    """Steps between taking a snapshot and applying the round's result. With ``pace: measured`` in proportion."""
    when: Literal["fixed", "arrival"] = "fixed"
    """``fixed``: a round is applied at snapshot + overlap. ``arrival``: as soon as it is there, at most then."""
    apply: Literal["carry", "blend"] = "carry"
    """``carry``: steps made meanwhile are kept whole. ``blend``: mixed by alpha; not in a butterfly."""
    alpha: Share = 0.5
    """For ``blend``: the share of the cell's own value that is kept; less than 1."""
    codec: CodecName = "int8"
    """How values travel; norms, routers, embeddings and what ``exact`` names go as bf16 (with ``fp32``: whole)."""
    rounding: Rounding | None = None
    """Left out: ``stochastic`` for int8 and int4, ``nearest`` for the others, which know no other."""
    block: int | None = Field(default=None, ge=4, le=65_535)
    """Values per scale. Left out: 256 for int8, 128 for int4, 64 for 2bit."""
    feedback: Share | None = None
    """Share of what compression left out that goes with the next packet. Left out: 1, with 2bit 0.95."""
    exact: tuple[str, ...] = ()
    """Patterns of more parameters that go as bf16, such as ``*.attention.*``."""
    outer: Outer = Outer()
    late: Late = Late()
    chunk: int = Field(default=4_194_304, ge=256)
    """Values per chunk. 4 Mi values are 16 MiB of fp32, 4 MiB of int8: small enough to resend, large to stream."""

    @field_validator("rounding")
    @classmethod
    def _codec_rounds_so(cls, rounding: Rounding | None, info: ValidationInfo) -> Rounding | None:
        codec: CodecName | None = info.data.get("codec")
        if rounding is not None and codec is not None and (trouble := rounding_trouble(codec, rounding)):
            raise ValueError(trouble)
        return rounding

    @field_validator("block")
    @classmethod
    def _codec_takes_block(cls, block: int | None, info: ValidationInfo) -> int | None:
        codec: CodecName | None = info.data.get("codec")
        if block is not None and codec is not None:
            rounding = info.data.get("rounding") or FACTS[codec].rounding
            if trouble := block_trouble(codec, rounding, block):
                raise ValueError(trouble)
        return block

    @property
    def beta(self) -> float:
        """β of error feedback: the recipe's, or the codec's usual one."""
        return FACTS[self.codec].feedback if self.feedback is None else self.feedback

    @property
    def bound(self) -> float:
        """Of ``pace: measured``: the recipe's, or the usual one."""
        return 2.0 if self.pace_bound is None else self.pace_bound

    @model_validator(mode="after")
    def _consistent(self) -> Exchange:
        if self.overlap >= self.window:
            raise self.contradiction(
                f"overlap {self.overlap} must be smaller than window {self.window}", "overlap", "window"
            )
        if self.fragments > self.window:
            raise self.contradiction(
                f"fragments {self.fragments} must not exceed window {self.window}: one starts per step",
                "fragments",
                "window",
            )
        if self.mode == "butterfly" and self.apply == "blend":
            raise self.contradiction(
                "a butterfly moves partners half-way to each other and keeps what was trained meanwhile: "
                "apply: blend would move the mean of all cells; leave it out",
                "apply",
            )
        if self.apply == "blend" and self.alpha == 1:
            raise self.contradiction(
                "alpha 1 keeps the cell's own value whole: nothing that the others learn would ever reach it; less "
                "than 1, or leave apply: blend out",
                "alpha",
            )
        if self.pace_bound is not None and self.pace == "equal":
            raise self.contradiction("pace_bound is for pace: measured", "pace_bound")
        if self.pace == "measured" and self.mode == "butterfly":
            raise self.contradiction(
                "a butterfly mixes partners half and half, however long each has trained: with unequal steps the "
                "mean would not be that of the tokens; leave pace out, or set mode: two-site",
                "pace",
                "mode",
            )
        if self.pace == "measured" and self.mode == "none":
            raise self.contradiction("one cell alone waits for nobody; leave pace out", "pace", "mode")
        if self.warmup and self.mode != "two-site":
            raise self.contradiction(f"warmup is for mode: two-site, not for {self.mode}", "warmup", "mode")
        return self
