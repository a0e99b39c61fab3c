"""The state of any torch optimizer, under its parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from islandctl.errors import ConfigError
from islandctl.worker.tensors import Shape


@runtime_checkable
class NamedState(Protocol):
    """An optimizer that keeps its own state in order: all of it exists from the start, to be filled in place."""

    def tensors(self) -> dict[str, Tensor]:
        """Its state by ``<parameter>/<what>``; a key that ends in ``.rank-<n>`` belongs to one rank."""


class OptimizerState:
    """What a checkpoint holds of the optimizers: tensors of the whole cell, tensors of this rank, and plain values.

    Args:
        optimizer: a torch optimizer, several of them, or a ``NamedState``.
        parameters: of the model, by name.

    Raises:
        ConfigError: it holds a parameter that is not the model's, or is no optimizer.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        self._named = optimizer if isinstance(optimizer, NamedState) else None
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        self._optimizers: list[torch.optim.Optimizer] = [] if self._named else list(several)
        self._names = {parameter: name for name, parameter in parameters.items()}
        for each in self._optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigError(f"attach: a {type(each).__name__} is no torch optimizer")
            for parameter in (one for group in each.param_groups for one in group["params"]):
                if parameter not in self._names:
                    raise ConfigError(
                        f"attach: the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model "
                        "has not",
                        hint="make the optimizer from this model's parameters, after it was sharded or moved",
                    )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the whole cell (also where they are sharded), by ``<parameter>/<what>``."""
        if self._named is not None:
            return self._named.tensors()
        return {key: tensor for key, tensor, own in self._each() if not own}

    def own(self) -> dict[str, Tensor]:
        """The tensors of this rank: plain ones that belong to a sharded parameter."""
        return {key: tensor for key, tensor, own in self._each() if own}

    def values(self) -> list[Any]:
        """All else, as plain values: each optimizer's groups (learning rates, …), and state that is no tensor."""
        return [
            {
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups],
                "state": {
                    self._names[parameter]: {key: value for key, value in state.items() if not _is_tensor(value)}
                    for parameter, state in each.state.items()
                },
            }
            for each in self._optimizers
        ]

    def prepare(self, shapes: Mapping[str, Shape]) -> None:
        """Make room for state that a checkpoint has and a new optimizer has not yet, to be filled in place.

        Single numbers lie on the processor where torch's optimizers have them: unless they are fused or capturable.

        Args:
            shapes: of all tensors in the checkpoint, by ``<parameter>/<what>``.
        """
        holders = {
            self._names[parameter]: (each, group, parameter)
            for each in self._optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }
        for full, (size, dtype) in shapes.items():
            name, key = full.rsplit("/", 1)
            if name in holders:
                each, group, parameter = holders[name]
                if key not in each.state[parameter]:
                    each.state[parameter][key] = _room(parameter, size, dtype, group)

    def take(self, values: Sequence[Any], own: Mapping[str, Tensor]) -> None:
        """Set what ``values`` and ``own`` gave; the tensors are filled already."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        for each, told in zip(self._optimizers, values, strict=True):
            for group, saved in zip(each.param_groups, told["groups"], strict=True):
                group.update(saved)
            for name, state in told["state"].items():
                each.state[parameters[name]].update(state)
            for full, tensor in own.items():
                name, key = full.rsplit("/", 1)
                if parameters[name] in each.state:
                    state = each.state[parameters[name]]
                    if key in state:
                        state[key].copy_(tensor)
                    else:
                        state[key] = tensor.to(parameters[name].device)

    def _each(self) -> list[tuple[str, Tensor, bool]]:
        """Every tensor with its key, and whether it is this rank's alone."""
        found = []
        for each in self._optimizers:
            for parameter, state in each.state.items():
                for key, value in state.items():
                    if _is_tensor(value):
                        own = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0
                        found.append((f"{self._names[parameter]}/{key}", value, own))
        return found


def _room(parameter: Tensor, size: tuple[int, ...], dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    if size == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_device = size or group.get("fused") or group.get("capturable")
    return torch.zeros(size, dtype=dtype, device=parameter.device if on_device else "cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
