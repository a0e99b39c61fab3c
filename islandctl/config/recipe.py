"""The recipe: what is trained, on what, and how the cells exchange."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from islandctl.config.budget import Budget
from islandctl.config.codec import FACTS, CodecName, Rounding, block_trouble, rounding_trouble
from islandctl.config.model import Name, Settings
from islandctl.config.site import Bandwidth, RoundTrip, checked_address
from islandctl.config.units import Seconds, Share, parse_seconds, within

Deadline = Annotated[Seconds, within(parse_seconds, least="1 ms", most="30 d")]
"""A time to wait: more than nothing."""
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
STDLIB = "python-stdlib"
"""The word for the Python library's own sources, found on every machine."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelRecipe(Settings):
    """A decoder-only transformer."""

    kind: Literal["dense", "moe"]
    """``moe``: every feed-forward layer is a mixture of experts."""
    layers: int = Field(ge=1, le=10_000)
    """Transformer blocks."""
    width: int = Field(ge=8, le=1_000_000)
    """Size of the residual stream."""
    heads: int = Field(ge=1, le=100_000)
    """Attention heads."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; left out: as many as heads."""
    hidden: int = Field(ge=8, le=10_000_000)
    """Inner width of the feed-forward layer; of one expert in a ``moe``."""
    experts: int | None = Field(default=None, ge=2, le=100_000)
    """Experts a layer; only in a ``moe``."""
    active_experts: int | None = Field(default=None, ge=1)
    """Experts per token."""
    balance: float = Field(default=0.01, ge=0)
    """Weight of the load-balancing loss; 0.01 is the common choice since Switch Transformers."""
    vocabulary: int = Field(default=256, ge=256, le=10_000_000)
    """At least 256: the text is read as bytes."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelRecipe:
        if self.width % self.heads:
            raise self.contradiction(f"width {self.width} is not divisible by heads {self.heads}", "heads")
        if (self.width // self.heads) % 2:
            raise self.contradiction(
                f"width / heads = {self.width // self.heads} must be even (rotary positions)", "heads"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise self.contradiction(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}", "kv_heads")
        moe = self.experts is not None and self.active_experts is not None
        if self.kind == "moe" and not moe:
            raise self.contradiction("kind: moe needs experts and active_experts", "kind")
        if self.kind == "dense" and (self.experts is not None or self.active_experts is not None):
            raise self.contradiction(
                "kind: dense takes neither experts nor active_experts", "experts", "active_experts"
            )
        if self.experts is not None and self.active_experts is not None and self.active_experts > self.experts:
            raise self.contradiction(
                f"active_experts {self.active_experts} is more than experts {self.experts}", "active_experts"
            )
        return self


class DataRecipe(Settings):
    """The text. Every site reads its own copy; the held-out part must be the same everywhere."""

    paths: tuple[str, ...] = Field(min_length=1)
    """Folders, files or globs on the sites. The word ``python-stdlib`` means the Python library's own sources."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md")
    """Files that count inside folders."""
    held_out: Annotated[Share, Field(gt=0, lt=1)] = 0.05
    """Share of the files (chosen by a hash of their content) kept out of training for evaluation."""
    limit_bytes: int | None = Field(default=None, ge=1)
    """Read at most this much text, for rehearsals."""

    @field_validator("paths")
    @classmethod
    def _paths_are_absolute(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if path != STDLIB and not path.startswith(("/", "~/")):
                raise ValueError(
                    f"'{path}' is relative, but sites share no current folder; begin with / or ~/, or write {STDLIB}"
                )
        return paths


class Optimizer(Settings):
    """The inner optimizer. Norms, routers, embeddings and the head are on AdamW with every ``kind``."""

    kind: Literal["adamw", "shampoo", "soap", "muon"] = "adamw"
    """All with decoupled weight decay. ``soap`` needs the package pytorch-optimizer on the sites."""
    lr: float = Field(gt=0, le=100)
    """Peak of the learning rate. ``shampoo`` and ``soap`` begin best with AdamW's; ``muon`` wants a larger one."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """0.95 rather than torch's 0.999: the usual choice for language models at short horizons."""
    eps: float = Field(default=1e-8, gt=0)
    """Torch's own default."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The usual choice for language models."""
    clip: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    refresh: int | None = Field(default=None, ge=1)
    """Only ``shampoo`` and ``soap``: steps from one decomposition to the next. Left out: 10, SOAP's own choice."""
    factor_beta: Beta | None = None
    """Only ``shampoo`` and ``soap``: how long row and column covariances remember. Left out: the second of betas."""
    block: int | None = Field(default=None, ge=8)
    """Only ``shampoo``: larger matrices are cut into blocks with at most this side. Left out: 1024."""
    damping: float | None = Field(default=None, gt=0, le=1)
    """Only ``shampoo``: added to a covariance, relative to its largest eigenvalue. Left out: 1e-6."""
    graft: Literal["adam", "none"] | None = None
    """Only ``shampoo``: whose length a block's step has, Adam's or Shampoo's own. Left out: ``adam``."""
    momentum: Beta | None = None
    """Only ``muon``: of its matrices; betas are for the rest. Left out: 0.95."""

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Optimizer:
        for key, kinds in _ONLY_FOR.items():
            if getattr(self, key) is not None and self.kind not in kinds:
                raise self.contradiction(f"'{key}' is only for kind: {' or '.join(kinds)}, not {self.kind}", key)
        return self


_ONLY_FOR = {
    "refresh": ("shampoo", "soap"),
    "factor_beta": ("shampoo", "soap"),
    "block": ("shampoo",),
    "damping": ("shampoo",),
    "graft": ("shampoo",),
    "momentum": ("muon",),
}


class Schedule(Settings):
    """The learning rate over the steps: linear warm-up, then decay to ``final`` times the peak."""

    warmup: int | None = Field(default=None, ge=0)
    """Steps; left out: 100, or all steps of a shorter training."""
    decay: Literal["cosine", "linear", "none"] = "cosine"
    """From the end of the warm-up to the last step."""
    final: Share = 0.1
    """Share of the peak at the last step."""


class Training(Settings):
    """The loop inside a cell."""

    steps: Steps
    """Inner steps of every cell."""
    batch: int = Field(ge=1, le=10_000_000)
    """Sequences per cell and step, over all its ranks."""
    sequence: int = Field(ge=2, le=100_000_000)
    """Tokens per sequence."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; parameters and optimizer are float32."""
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the first values, the order of the data and the rounding of packets."""

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return min(100, self.steps) if self.schedule.warmup is None else self.schedule.warmup

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.warmup > self.steps:
            raise self.contradiction(
                f"a warm-up of {self.warmup} steps never ends in a training of {self.steps}", "schedule.warmup"
            )
        return self


class Outer(Settings):
    """The optimizer that moves the anchor."""

    kind: Literal["nesterov"] = "nesterov"
    """SGD with Nesterov momentum."""
    lr: float = Field(default=0.7, gt=0, le=10)
    """0.7 and 0.9 are DiLoCo's published pair."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """See ``lr``."""


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
    overlap: int = Field(default=5, ge=0)
    """Steps between taking a snapshot and applying the round's result."""
    when: Literal["fixed", "arrival"] = "fixed"
    """``fixed``: a round is applied at snapshot + overlap. ``arrival`` (not launched yet): as soon as it is there."""
    apply: Literal["carry", "blend"] = "carry"
    """``carry``: steps made meanwhile are kept whole. ``blend`` (not launched yet): mixed by alpha."""
    alpha: Share = 0.5
    """For ``blend``: the share of the cell's own value that is kept."""
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
        return self


class CheckpointRecipe(Settings):
    """Joint checkpoints."""

    every: Steps = 100
    """Steps."""
    keep: int = Field(default=2, ge=1)
    """Joint checkpoints kept; two, so that one damaged file is not the end."""


class Evaluation(Settings):
    """Bits per byte on held-out text, the same text at every site."""

    every: Steps = 50
    """Steps."""
    sequences: int = Field(default=64, ge=1)
    """Sequences of held-out text that one evaluation reads."""


class Emulate(Settings):
    """A WAN emulated inside the relay, per cell and direction, for rehearsals on one machine."""

    bandwidth: Bandwidth
    """Of each cell, in each direction."""
    rtt: RoundTrip
    """Added to every request."""


class RelayRecipe(Settings):
    """Where the relay runs."""

    host: str = "controller"
    """``controller``, or an ssh alias / [user@]host[:port]."""
    address: str | None = Field(default=None, min_length=1)
    """Address under which the sites reach the relay. Left out: a local site uses loopback, others a tunnel."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Left out: a free port, chosen once per run."""
    emulate: Emulate | None = None

    @field_validator("host")
    @classmethod
    def _host_is_address(cls, host: str) -> str:
        return checked_address(host)


class Restart(Settings):
    """What the supervisor does with a worker that dies."""

    limit: int = Field(default=10, ge=0)
    """Restarts without progress in between before the supervisor gives up."""
    backoff: Deadline = 2.0
    """First pause; doubles each time up to ``backoff_limit``."""
    backoff_limit: Deadline = 60.0
    """Longest pause."""


class WorkerRecipe(Settings):
    """The worker processes."""

    restart: Restart = Restart()
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables."""


class Recipe(Settings):
    """Everything that decides what is learnt, and how."""

    name: Name
    """Begins the names of runs."""
    model: ModelRecipe
    data: DataRecipe
    training: Training
    exchange: Exchange = Exchange()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    evaluation: Evaluation = Evaluation()
    relay: RelayRecipe = RelayRecipe()
    worker: WorkerRecipe = WorkerRecipe()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        limit, sequence = self.data.limit_bytes, self.training.sequence
        if limit is not None and limit <= sequence:
            raise self.contradiction(
                f"{limit} bytes hold no whole sequence of training.sequence {sequence} and its next byte",
                "data.limit_bytes",
            )
        return self
