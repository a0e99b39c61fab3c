"""The profile's section ``slurm``, and what a job asks Slurm for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator, model_validator

from islandctl.config.model import Settings
from islandctl.config.units import Bytes, Seconds, parse_seconds, seconds_text, within

if TYPE_CHECKING:
    from islandctl.config.site import SiteProfile

_OURS = (
    *("array", "chdir", "cluster", "clusters", "error", "input", "job-name"),
    *("nodes", "ntasks", "ntasks-per-node", "output", "wrap"),
)
_OURS_SHORT = ("-a", "-D", "-e", "-i", "-J", "-M", "-N", "-n", "-o")
CPU = "cpu"
"""The type of accelerator that none is asked for."""


class Slurm(Settings):
    """What a cell's job asks of the scheduler ``slurm``: one job a cell, one task a node."""

    partition: str | None = Field(default=None, min_length=1)
    """``sbatch --partition``."""
    account: str | None = Field(default=None, min_length=1)
    """``sbatch --account``."""
    qos: str | None = Field(default=None, min_length=1)
    """``sbatch --qos``."""
    constraint: str | None = Field(default=None, min_length=1)
    """``sbatch --constraint``: features of the nodes."""
    time: Annotated[Seconds, within(parse_seconds, least="1 min", most="3650 d")] | None = None
    """The job's time limit, in whole minutes. Left out: the partition's. A run may take longer: see ``margin``."""
    margin: Annotated[Seconds, within(parse_seconds, least="10 s", most="18 h")] = 300.0
    """So long before the time limit the cell checkpoints and its job is queued again. Slurm may be a minute early."""
    gres: str | None = Field(default=None, min_length=1)
    """How the accelerators of a node are asked for, for example ``gpu:h100:4``. Left out: ``gpu:N`` with the N that a
    node gives. ``none``: not at all, where whole nodes are given out."""
    memory: Bytes | None = None
    """Of one node. Left out: all that the node has; of a cell that takes part of a node, its part of cpu.memory."""
    extra: tuple[str, ...] = ()
    """More options for sbatch, one an entry, as they are: ``--exclusive``, ``--licenses=scratch``."""

    @field_validator("extra")
    @classmethod
    def _extra_are_options(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for option in extra:
            name = option.partition("=")[0]
            if not option.startswith("-"):
                raise ValueError(f"'{option}' is no option of sbatch; write --name=value as one entry")
            if name.removeprefix("--") in _OURS or option[:2] in _OURS_SHORT:
                raise ValueError(f"'{name}' is islandctl's own business: a cell is one job with one task a node")
        return extra

    @model_validator(mode="after")
    def _margin_lies_within(self) -> Slurm:
        if self.time is not None and self.margin >= self.time:
            told = f"margin {seconds_text(self.margin)} must be shorter than time {seconds_text(self.time)}"
            raise self.contradiction(told, "margin", "time")
        return self


def partitions_of(asked: Slurm) -> str | None:
    """The partitions that a job goes to, as sbatch takes them; None: the site's usual one."""
    found = asked.partition
    for at, option in enumerate(asked.extra):
        name, equals, value = option.partition("=")
        if name == "--partition":
            found = value if equals else (*asked.extra[at + 1 :], None)[0]
        elif option.startswith("-p"):
            found = option[2:] or (*asked.extra[at + 1 :], None)[0]
    return found


def sbatch_options(
    site: SiteProfile, num_nodes: int, ranks_per_node: int, *, limit_s: float | None = None
) -> tuple[str, ...]:
    """What the job of one cell asks for, as options of sbatch; the profile's ``extra`` last, where it wins.

    Args:
        num_nodes, ranks_per_node: of the cell.
        limit_s: of a job that only asks the nodes, and is not queued again: its time limit, whatever the profile
            says of that.
    """
    asked = site.slurm or Slurm()
    share = ranks_per_node / site.gpu.per_node
    options = [
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, math.floor(site.cpu.cores * share))}",
    ]
    if asked.memory is not None or share < 1:
        memory = asked.memory if asked.memory is not None else site.cpu.memory * share
        options.append(f"--mem={math.floor(memory / 2**20)}M")
    else:
        options.append("--mem=0")
    gres = asked.gres or (f"gpu:{ranks_per_node}" if site.gpu.type != CPU else "none")
    options += [] if gres == "none" else [f"--gres={gres}"]
    for key in ("partition", "account", "qos", "constraint"):
        if (value := getattr(asked, key)) is not None:
            options.append(f"--{key}={value}")
    if limit_s is not None:
        return (*options, *asked.extra, f"--time={math.ceil(limit_s / 60)}", "--no-requeue")
    if asked.time is not None:
        options.append(f"--time={math.ceil(asked.time / 60)}")
    # TERM goes to the tasks of the job and not to its script, as it does before a preemption with a grace time.
    return (*options, f"--signal=TERM@{math.ceil(asked.margin)}", "--requeue", *asked.extra)
