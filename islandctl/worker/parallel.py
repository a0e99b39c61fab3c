"""The ranks of one cell: who they are, how they share the model, how they agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from islandctl.errors import ConfigError, PreflightError
from islandctl.worker.experts import Experts
from islandctl.worker.model import Block, Decoder, initialise

TIMEOUT = timedelta(minutes=30)
"""Longer than a round's deadline plus a slow checkpoint: ranks wait for each other there."""


@dataclass(frozen=True)
class Ranks:
    """This process among the cell's processes. ``mesh`` and ``group`` are None in a cell of one rank."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    group: Any = None
    """A gloo group for small control messages, also where the gradients go over NCCL."""

    @classmethod
    def start(cls, expected: int) -> Ranks:
        """Join the other ranks, as torchrun's environment names them. Makes torch deterministic.

        Raises:
            ConfigError: another number of ranks than the plan's.
            PreflightError: the node has fewer GPUs than ranks.
        """
        rank, size = _started(expected)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms, which loads the compiler
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what it has not written
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if device.index >= torch.cuda.device_count():
                raise PreflightError(
                    f"rank {rank} should use GPU {device.index}, but this node shows {torch.cuda.device_count()}",
                    hint="compare nvidia-smi on the node with gpu.per_node in the site profile",
                )
            torch.cuda.set_device(device)
        if size == 1:
            return cls(rank, size, device)
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        return cls(rank, size, device, init_device_mesh(device.type, (size,)), _gloo())

    @classmethod
    def joined(cls, expected: int, device: torch.device) -> Ranks:
        """The ranks that a script has brought together by itself.

        Args:
            device: where this rank's parameters are.

        Raises:
            ConfigError: another number of ranks than the plan's, or they are not together yet.
        """
        rank, size = _started(expected)
        if size == 1:
            return cls(rank, size, device)
        if not dist.is_initialized():
            raise ConfigError(
                f"attach: the cell has {size} ranks, but they are not together yet",
                hint="call torch.distributed.init_process_group() before islandctl.attach()",
            )
        return cls(rank, size, device, group=_gloo())

    @property
    def leads(self) -> bool:
        """Rank 0: the one that speaks for the cell."""
        return self.rank == 0

    def agree(self, flags: Sequence[int]) -> list[int]:
        """The largest of each flag over all ranks: one small all-reduce."""
        if self.size == 1:
            return list(flags)
        values = torch.tensor(list(flags), dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in values]

    def tell(self, value: Any) -> Any:
        """Rank 0's JSON-like value, at every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, at every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place, without gradient."""
        if self.size > 1 and tensor.numel():
            dist.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        """Leave the other ranks."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _started(expected: int) -> tuple[int, int]:
    """Rank and number of ranks, as torchrun started them."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != expected:
        raise ConfigError(
            f"the cell has {expected} ranks by its plan, but {size} were started",
            hint="start it with islandctl launch or resume; both take the number from the plan",
        )
    return rank, size


def _gloo() -> Any:
    """A gloo group of all ranks for small control messages."""
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def build(model: Decoder, ranks: Ranks, *, seed: int, precision: str) -> Decoder:
    """Share a model made on the meta device over the ranks (FSDP2, a unit a block), place and initialise it.

    Parameters are float32; ``bfloat16`` is the precision of the arithmetic, except in the routers.
    """
    if ranks.mesh is not None:
        reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = reduced if precision == "bfloat16" else MixedPrecisionPolicy()
        for block in model.blocks:
            ffn = cast(Block, block).ffn
            if isinstance(ffn, Experts) and precision == "bfloat16":
                fully_shard(ffn.router, mesh=ranks.mesh)
            fully_shard(block, mesh=ranks.mesh, mp_policy=policy)
        fully_shard(model, mesh=ranks.mesh, mp_policy=policy)
    model.to_empty(device=ranks.device)
    initialise(model, seed)
    return model


def arithmetic(ranks: Ranks, precision: str) -> AbstractContextManager[Any]:
    """The context in which forward passes run."""
    if precision == "bfloat16":
        return torch.autocast(ranks.device.type, dtype=torch.bfloat16)
    return nullcontext()


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name."""
    return dict(model.named_parameters())
