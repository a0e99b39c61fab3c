"""One rank of two with sharded parameters, as a process of its own (gloo on the CPU)."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from islandctl.config.recipe import Optimizer, Schedule, Training
from islandctl.worker import tensors as disk
from islandctl.worker.optimizer import InnerOptimizer
from islandctl.worker.parallel import Ranks

SPAWN = multiprocessing.get_context("spawn")
SHAPES = {"q.weight": (6, 5), "gate": (4, 5, 6), "few": (1, 4, 4), "row.weight": (1, 5), "norm.weight": (6,)}
KINDS = ("adamw", "shampoo", "soap", "muon")
BEFORE, AFTER = 5, 4


def training(kind: str) -> Training:
    """Without clipping, since the norm is over all ranks' parameters."""
    refresh = {} if kind in ("adamw", "muon") else {"refresh": 3}
    optimizer = Optimizer(kind=kind, lr=0.05, clip=1e9, **refresh)  # type: ignore[arg-type]
    return Training(steps=20, batch=1, sequence=8, optimizer=optimizer, schedule=Schedule(warmup=0, decay="none"))


def values(name: str, step: int) -> Tensor:
    """A parameter's start (step −1) or gradient, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * list(SHAPES).index(name) + step + 1)
    return torch.randn(SHAPES[name], generator=generator)


def rank_main(rank: int, size: int, folder: Path) -> None:
    """Step, save, step; load into fresh ones, step; write both results to ``folder/KIND-RANK``."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    ranks = Ranks(rank, size, torch.device("cpu"), mesh, dist.group.WORLD)

    def sharded(name: str, step: int) -> Tensor:
        return distribute_tensor(values(name, step), mesh, [Shard(0)])

    def begin(kind: str) -> tuple[dict[str, nn.Parameter], InnerOptimizer, dict[str, Tensor]]:
        parameters = {name: nn.Parameter(sharded(name, -1)) for name in SHAPES}
        inner = InnerOptimizer(parameters, training(kind))
        kept = {f"model/{name}": p.detach() for name, p in parameters.items()}
        return parameters, inner, kept | {f"optimizer/{name}": t for name, t in inner.tensors().items()}

    def run(parameters: dict[str, nn.Parameter], inner: InnerOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            for name, parameter in parameters.items():
                parameter.grad = sharded(name, step)
            inner.step(step)

    for kind in KINDS:
        parameters, inner, kept = begin(kind)
        run(parameters, inner, 0, BEFORE)
        path = folder / kind
        disk.save(path, kept, ranks)
        run(parameters, inner, BEFORE, BEFORE + AFTER)

        resumed, again, kept = begin(kind)
        disk.load(path, kept, {file.name for file in path.iterdir()}, ranks)
        run(resumed, again, BEFORE, BEFORE + AFTER)
        result = {f"straight/{name}": p.detach().to_local() for name, p in parameters.items()}
        result |= {f"resumed/{name}": p.detach().to_local() for name, p in resumed.items()}
        torch.save(result, folder / f"{kind}-{rank}")
    dist.destroy_process_group()
