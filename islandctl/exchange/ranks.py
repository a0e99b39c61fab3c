"""The ranks of one cell: rank 0 decides, all ranks fail together.

Everything here is collective: all ranks make the same calls in the same order. A cell of one rank needs no group and
pays nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from islandctl import errors
from islandctl.errors import ExchangeError, IslandError


class Ranks:
    """A gloo group of CPU tensors, or this process alone.

    Args:
        group: the cell's control group; None for a cell of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def agree(self, error: IslandError | None) -> None:
        """Raise on every rank when there is an error on any: one's own, else that of the lowest rank that has one."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        if self.most([int(error is not None)]) == [0]:
            return
        told: list[tuple[str, str, str] | None] = [None] * self.size
        mine = None if error is None else (type(error).__name__, error.message, error.hint)
        dist.all_gather_object(told, mine, group=self._group)
        if error is not None:
            raise error
        kind, message, hint = next(one for one in told if one is not None)
        raised = getattr(errors, kind, ExchangeError)
        raise raised(message, hint=hint)

    @property
    def leads(self) -> bool:
        """Rank 0: the one that speaks for the cell."""
        return self.rank == 0

    def decide(self, values: list[int]) -> list[int]:
        """Rank 0's ``values`` on every rank; all must pass as many."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return [int(value) for value in tensor]

    def most(self, values: list[int]) -> list[int]:
        """Of each value the largest over all ranks; all must pass as many."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """``tensor`` of the rank ``owner``, in place on the others."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=owner)
        return tensor

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks, in fp64."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return [float(value) for value in tensor]
