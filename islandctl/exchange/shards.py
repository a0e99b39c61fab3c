"""Between the ranks' shards of whole parameters and the chunks that ranks own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from islandctl.errors import ConfigError
from islandctl.exchange.fragments import Chunk, Fragment
from islandctl.exchange.ranks import Ranks


class Shards:
    """The model's parameters as this rank holds them.

    Args:
        parameters: plain fp32 tensors, or DTensors of FSDP2 in any placement of shards and replicas.
        ranks: the cell's ranks.

    Raises:
        ConfigError: a parameter is not fp32, or has no values yet.
    """

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"parameter '{name}' is {parameter.dtype}: the exchange needs fp32 parameters",
                    hint="keep fp32 master weights and compute in bf16 (FSDP2: MixedPrecisionPolicy)",
                )
            if parameter.is_meta:
                raise ConfigError(
                    f"parameter '{name}' is on the meta device: it has no values yet",
                    hint="give it first values before islandctl.attach(): model.to_empty(device=…), then the same "
                    "values in every cell",
                )
        self._parameters = parameters
        self._ranks = ranks

    def owned(self, fragment: Fragment) -> list[Chunk]:
        """The chunks of ``fragment`` that this rank owns."""
        return [chunk for chunk in fragment.chunks if chunk.global_index % self._ranks.size == self._ranks.rank]

    def local(self, name: str) -> Tensor:
        """This rank's part of a parameter; writing to it changes the model."""
        parameter = self._parameters[name].detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    @torch.no_grad()
    def gather(self, fragment: Fragment) -> dict[int, Tensor]:
        """The present values of this rank's chunks, fp32 on the CPU, by index. Collective, a parameter at a time."""
        owned = self.owned(fragment)
        values = {chunk.index: torch.empty(chunk.numel) for chunk in owned}
        for placement in fragment.placements:
            parameter = self._parameters[placement.name].detach()
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            flat = whole.reshape(-1)
            for chunk in owned:
                low, high = max(chunk.start, placement.start), min(chunk.end, placement.end)
                if low < high:
                    piece = flat[low - placement.start : high - placement.start]
                    values[chunk.index][low - chunk.start : high - chunk.start].copy_(piece)
        return values

    @torch.no_grad()
    def scatter(self, fragment: Fragment, chunks: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's (name, this rank's part) of what the owners hold in ``chunks``. Collective.

        One parameter and one chunk are in memory at a time.
        """
        pending = iter(fragment.chunks)
        chunk, content = self._next(pending, chunks)
        for placement in fragment.placements:
            whole = torch.empty(placement.numel)
            while True:
                low, high = max(chunk.start, placement.start), min(chunk.end, placement.end)
                whole[low - placement.start : high - placement.start] = content[
                    low - chunk.start : high - chunk.start
                ]
                if chunk.end >= placement.end:
                    break
                chunk, content = self._next(pending, chunks)
            yield placement.name, self._part(placement.name, whole.view(placement.shape))
            if chunk.end == placement.end and chunk is not fragment.chunks[-1]:
                chunk, content = self._next(pending, chunks)

    def _next(self, pending: Iterator[Chunk], chunks: Mapping[int, Tensor]) -> tuple[Chunk, Tensor]:
        chunk = next(pending)
        owner = chunk.global_index % self._ranks.size
        content = chunks[chunk.index].contiguous() if owner == self._ranks.rank else torch.empty(chunk.numel)
        return chunk, self._ranks.broadcast(content, owner)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter, on the parameter's device. No communication."""
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return whole.to(parameter.device)
        mesh = parameter.device_mesh
        everywhere = DTensor.from_local(
            whole.to(parameter.to_local().device), mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        return everywhere.redistribute(mesh, parameter.placements).to_local()
