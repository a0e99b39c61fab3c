"""The recipe: what is trained, on what, and how the cells exchange."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from islandctl.config.budget import Budget
from islandctl.config.exchange import Exchange
from islandctl.config.model import Name, Settings
from islandctl.config.site import Bandwidth, RoundTrip, checked_address, checked_secrets
from islandctl.config.units import Bytes, Deadline, Share, Size, Steps

STDLIB = "python-stdlib"
"""The word for the Python library's own sources, found on every machine."""
_SECRET = re.compile("(^|_)(API_?KEY|ACCESS_KEY|SECRET_?KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
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
    limit_bytes: Size | None = None
    """Read at most this much text, for rehearsals."""
    size: Bytes | None = None
    """Of the whole text, for the planner: every rank holds it in memory. It decides nothing that is learnt."""

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
    """Sequences (or samples) per cell and step, over all its ranks."""
    sequence: int = Field(default=1, ge=1, le=100_000_000)
    """Tokens per sequence. Required, and at least 2, unless a script of your own trains: one without sequences leaves
    it out, and its samples are counted."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; parameters and optimizer are float32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: those that are cheap to compute, or all but
    the blocks' inputs. Other than ``none``: planned, not launched yet."""
    optimizer: Optimizer | None = None
    """Required, unless a script of your own trains."""
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

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the built-in loop, where the recipe has it by rule."""
        assert self.optimizer is not None
        return self.optimizer


class CheckpointRecipe(Settings):
    """Joint checkpoints."""

    every: Steps = 100
    """Steps."""
    keep: int = Field(default=2, ge=1)
    """Joint checkpoints kept, at least two, so that one damaged file is not the end. While another cell is away, as
    many of those that no other cell has are kept beside them; while the relay is away, as many of those that it has
    not heard of, and one more."""


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


class Watchdog(Settings):
    """When workers that make no step count as hung: their stacks go into the log, and they are started again."""

    enabled: bool = True
    """``false``: never."""
    factor: float = Field(default=20.0, ge=2, le=100_000)
    """So many usual steps without a sign of life. A wait for the relay or a round gives signs of life."""
    least: Deadline = 1800.0
    """But no sooner than this: half an hour is longer than most of what a script of your own does between two steps.
    Starting, `island.evaluate` and checkpoints may take six times as long. Nothing is watched before `attach` and
    behind `finish`."""


class WorkerRecipe(Settings):
    """The worker processes."""

    command: tuple[str, ...] | None = None
    """A training script of your own: `[python, train.py, --lr, "1e-3"]`, or the same as one text. No shell. `python`
    is the interpreter of the site. The script calls `islandctl.attach`; see docs/attach.md. Left out: the built-in
    training."""
    files: tuple[str, ...] = ()
    """Files and folders beside the recipe that the script needs, itself included; at most 16 MiB in all: they travel
    with the plan to every node. Of a folder in a git repository all that git does not ignore, committed or not."""
    parameters: int | None = Field(default=None, ge=1)
    """How many parameters the script's model has. Left out: the plan cannot tell what the links carry."""
    restart: Restart = Restart()
    watchdog: Watchdog = Watchdog()
    logs: Size = Field(default=256 * 2**20, ge=4096)
    """What is kept of each rank's log, and of what torchrun prints on a node, in four pieces: the oldest is removed
    when a fifth begins."""
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables. They are kept with plan and record: no secrets."""
    secrets: tuple[str, ...] = ()
    """Names of this machine's environment variables that the workers need (`WANDB_API_KEY`). Their values are sent
    apart, to files that only you can read, and are kept nowhere else."""

    _names = field_validator("secrets")(checked_secrets)

    @field_validator("command", mode="before")
    @classmethod
    def _command_is_words(cls, command: object) -> object:
        if not isinstance(command, str):
            return command
        try:
            return tuple(shlex.split(command))
        except ValueError as error:
            raise ValueError(f"not a command: {str(error).lower()}") from error

    @field_validator("command")
    @classmethod
    def _command_is_python(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and (len(command) < 2 or command[0] != "python" or command[1:] == ("-m",)):
            raise ValueError("write `[python, SCRIPT, …]` or `[python, -m, MODULE, …]`")
        if command is not None and command[1].startswith("-") and command[1] != "-m":
            raise ValueError(f"'{command[1]}': of python's own options only -m can be given; use worker.env")
        return command

    @field_validator("files")
    @classmethod
    def _files_are_beside(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for name in files:
            if name.startswith(("/", "~")) or ".." in name.split("/"):
                raise ValueError(f"'{name}' is not beside the recipe; name files and folders there, without ..")
        return files

    @model_validator(mode="after")
    def _consistent(self) -> WorkerRecipe:
        if self.command is None and (self.files or self.parameters):
            raise self.contradiction("belongs to a command", "files", "parameters")
        for name in self.env:
            if name in self.secrets:
                raise self.contradiction(f"{name} is listed in worker.secrets as well", "env")
            if _SECRET.search(name):
                raise self.contradiction(
                    f"{name} looks like a secret, and worker.env is kept with plan and record; export it here and "
                    "list its name in worker.secrets",
                    "env",
                )
        return self


class Recipe(Settings):
    """Everything that decides what is learnt, and how."""

    name: Name
    """Begins the names of runs."""
    model: ModelRecipe | None = None
    """Required, unless a script of your own trains."""
    data: DataRecipe | None = None
    """Required, unless a script of your own trains."""
    training: Training
    exchange: Exchange = Exchange()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    evaluation: Evaluation = Evaluation()
    relay: RelayRecipe = RelayRecipe()
    worker: WorkerRecipe = WorkerRecipe()
    budget: Budget = Budget()

    @property
    def decoder(self) -> ModelRecipe:
        """The model of the built-in training, where the recipe has it by rule."""
        assert self.model is not None
        return self.model

    @property
    def text(self) -> DataRecipe:
        """The text of the built-in training, where the recipe has it by rule."""
        assert self.data is not None
        return self.data

    @model_validator(mode="after")
    def _says_what_trains(self) -> Recipe:
        """The built-in training is told all; what a script decides by itself would be written here in vain."""
        needed = {"model": self.model, "data": self.data, "training.optimizer": self.training.optimizer}
        if self.worker.command is None:
            sequence = self.training.sequence if "sequence" in self.training.model_fields_set else None
            for key, value in {**needed, "training.sequence": sequence}.items():
                if value is None:
                    last = key.rpartition(".")[2]
                    raise self.contradiction(f"key '{last}' is missing (only worker.command does without)", key)
            if self.training.sequence < 2:
                raise self.contradiction("at least 2: a token, and the one that it predicts", "training.sequence")
            return self
        usual = {
            "training.schedule": (self.training.schedule, Schedule()),
            "training.precision": (self.training.precision, "float32"),
            "training.recompute": (self.training.recompute, "none"),
            "evaluation": (self.evaluation, Evaluation()),
        }
        idle = [key for key, value in needed.items() if value is not None]
        idle += [key for key, (value, default) in usual.items() if value != default]
        if idle:
            raise self.contradiction("means nothing with worker.command: the script decides it; leave it out", *idle)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        limit, sequence = self.data.limit_bytes if self.data else None, self.training.sequence
        if limit is not None and limit <= sequence:
            raise self.contradiction(
                f"{limit} bytes hold no whole sequence of training.sequence {sequence} and its next byte",
                "data.limit_bytes",
            )
        warmup, steps = self.exchange.warmup, self.training.steps
        if warmup >= steps:
            raise self.contradiction(f"{warmup} steps must be fewer than training.steps {steps}", "exchange.warmup")
        return self

    @model_validator(mode="after")
    def _unequal_cells_meet(self) -> Recipe:
        """Cells that take unequal steps are at one step of the run only where a window ends."""
        window = self.exchange.window
        lengths = {
            "training.steps": self.training.steps,
            "exchange.warmup": self.exchange.warmup,
            "checkpoint.every": self.checkpoint.every,
        }
        for key, value in lengths.items() if self.exchange.pace == "measured" else ():
            if value % window:
                lower = value // window * window
                nearest = f"{lower} or {lower + window}" if lower else str(window)
                raise self.contradiction(
                    f"{value} steps are no whole windows of {window}, and with exchange.pace: measured cells meet "
                    f"only where a window ends; nearest: {nearest}",
                    key,
                    "exchange.pace",
                )
        return self
