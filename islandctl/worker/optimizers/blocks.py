"""Matrices cut into blocks, and blocks of equal shape stacked over parameters, so that one product serves them all.

Shapes: B blocks of a stack, M rows and N columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

STACK_VALUES = 2**22
"""Values at which a stack is full, if no parameter alone is larger: what a step needs besides the state is four such
tensors, so 64 MiB in float32; and a product of that many values fills a GPU."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 may have sharded; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True)
class Tile:
    """The same block of each of a parameter's matrices, at ``start`` to ``end`` of its stack."""

    parameter: Tensor
    number: int
    """Among the parameter's tiles."""
    rows: slice
    columns: slice
    start: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """The tile in a local tensor of the parameter's shape: (…, M, N), a view."""
        return tensor[..., self.rows, self.columns]


@dataclass
class Stack:
    """Blocks of one shape, and Shampoo's state of them. All tensors are float32 or float64, as the parameters."""

    group: int
    """Number of the parameter group."""
    tiles: tuple[Tile, ...]
    exp_avg: Tensor
    """(B, M, N)."""
    exp_avg_sq: Tensor
    """(B, M, N)."""
    left: Tensor
    """(B, M, M): mean of G·Gᵀ."""
    right: Tensor
    """(B, N, N): mean of Gᵀ·G."""
    left_root: Tensor
    """(B, M, M); zeros: not known yet."""
    right_root: Tensor
    """(B, N, N); zeros: not known yet."""

    @classmethod
    def of(cls, group: int, tiles: Iterable[Tile]) -> Stack:
        """With a state of zeros."""
        tiles = tuple(tiles)
        sample = tiles[0].of(local(tiles[0].parameter))
        size, (rows, columns) = tiles[-1].end, sample.shape[-2:]

        def zeros(one: int, other: int) -> Tensor:
            return sample.new_zeros((size, one, other))

        return cls(
            group,
            tiles,
            zeros(rows, columns),
            zeros(rows, columns),
            zeros(rows, rows),
            zeros(columns, columns),
            zeros(rows, rows),
            zeros(columns, columns),
        )

    def gather(self, source: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Copy the tiles of ``source(parameter)`` to ``out``, (B, M, N)."""
        shape = self.exp_avg.shape[1:]
        torch.cat([tile.of(source(tile.parameter)).reshape(-1, *shape) for tile in self.tiles], out=out)

    def scale_parameters(self, factor: float) -> None:
        """parameter ← factor · parameter."""
        torch._foreach_mul_([tile.of(local(tile.parameter)) for tile in self.tiles], factor)

    def add_to_parameters(self, update: Tensor, factor: float) -> None:
        """parameter ← parameter + factor · update, where ``update`` is (B, M, N)."""
        targets = [tile.of(local(tile.parameter)) for tile in self.tiles]
        pieces = [
            update[tile.start : tile.end].view(target.shape) for tile, target in zip(self.tiles, targets, strict=True)
        ]
        torch._foreach_add_(targets, pieces, alpha=factor)

    def state(self, tile: Tile) -> dict[str, Tensor]:
        """The tile's part of the state: views, under names that end in the tile's number."""
        names = ("exp_avg", "exp_avg_sq", "left", "right", "left_root", "right_root")
        return {f"{name}.{tile.number}": getattr(self, name)[tile.start : tile.end] for name in names}


def stacks(group: int, parameters: Iterable[Tensor], block: int) -> list[Stack]:
    """Cut parameters into blocks of at most ``block`` × ``block`` and stack those of equal shape.

    The last two dimensions are a matrix, all before them number matrices. Of a sharded parameter only this rank's
    part is cut, as if it were a parameter by itself. The order follows the order of the parameters.
    """
    done: list[Stack] = []
    open_tiles: dict[tuple[object, ...], list[Tile]] = {}
    for parameter in parameters:
        values = local(parameter)
        count = math.prod(values.shape[:-2])
        if values.numel() == 0:
            continue
        for number, (rows, columns) in enumerate(_cuts(values.shape[-2], values.shape[-1], block)):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            key = (*shape, values.dtype, values.device)
            tiles = open_tiles.setdefault(key, [])
            if tiles and (tiles[-1].end + count) * math.prod(shape) > STACK_VALUES:
                done.append(Stack.of(group, tiles))
                tiles.clear()
            start = tiles[-1].end if tiles else 0
            tiles.append(Tile(parameter, number, rows, columns, start, start + count))
    return done + [Stack.of(group, tiles) for tiles in open_tiles.values()]


class Scratch:
    """Memory that all stacks use in turn. Fresh memory for each step costs more time than the arithmetic on it."""

    def __init__(self) -> None:
        self._flat: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, count: int) -> list[Tensor]:
        """So many tensors of the same shape, dtype and device, with any content."""
        found = []
        for number in range(count):
            key = (number, tensor.dtype, tensor.device)
            if key not in self._flat or self._flat[key].numel() < tensor.numel():
                self._flat[key] = tensor.new_empty(tensor.numel())
            found.append(self._flat[key][: tensor.numel()].view(tensor.shape))
        return found


def _cuts(num_rows: int, num_columns: int, block: int) -> list[tuple[slice, slice]]:
    return [
        (slice(top, min(top + block, num_rows)), slice(left, min(left + block, num_columns)))
        for top in range(0, num_rows, block)
        for left in range(0, num_columns, block)
    ]
