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
        optimizer: a torch optimizer, several of them, or a ``NamedState``; None: the loop steps by itself.
        parameters: of the model, by name.

    Raises:
        ConfigError: it holds a parameter that is not the model's, or none holds one that is trained, or one is no
            optimizer.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        self._named = optimizer if isinstance(optimizer, NamedState) else None
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        by_itself = optimizer is None or self._named is not None
        self._optimizers: list[torch.optim.Optimizer] = [] if by_itself else list(several)
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
        if not by_itself:
            self._check_all_are_stepped()

    def _check_all_are_stepped(self) -> None:
        held = {parameter for _, names in self._kept() for parameter in names}
        left = [name for parameter, name in self._names.items() if parameter.requires_grad and parameter not in held]
        if left:
            more = f"; the same of {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(
                f"attach: parameter '{left[0]}' is trained (requires_grad), but no optimizer holds it{more}",
                hint="give all optimizers as a list; what is not trained: parameter.requires_grad_(False); where the "
                "loop steps the parameters itself: attach(model, None)",
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
            names[parameter]: (each, group, parameter)
            for each, names in self._kept()
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
        by_name = {name: parameter for parameter, name in self._names.items()}
        for (each, names), told in zip(self._kept(), values, strict=True):
            for group, saved in zip(each.param_groups, told["groups"], strict=True):
                group.update(saved)
            for name, state in told["state"].items():
                each.state[by_name[name]].update(state)
            kept = {name: parameter for parameter, name in names.items()}
            for full, tensor in own.items():
                name, key = full.rsplit("/", 1)
                if name in kept and kept[name] in each.state:
                    state = each.state[kept[name]]
                    if key in state:
                        state[key].copy_(tensor)
                    else:
                        state[key] = tensor.to(kept[name].device)

    def _kept(self) -> list[tuple[torch.optim.Optimizer, dict[Tensor, str]]]:
        """Every optimizer with the names under which its parameters' state is kept.

        Those are the parameters' own; of one that several optimizers step, ``<parameter>@<n>`` from the second on.
        """
        found: list[tuple[torch.optim.Optimizer, dict[Tensor, str]]] = []
        taken: set[Tensor] = set()
        for number, each in enumerate(self._optimizers):
            held = [parameter for group in each.param_groups for parameter in group["params"]]
            names = {one: f"{self._names[one]}@{number}" if one in taken else self._names[one] for one in held}
            taken.update(held)
            found.append((each, names))
        return found

    def _each(self) -> list[tuple[str, Tensor, bool]]:
        """Every tensor with its key, and whether it is this rank's alone."""
        found = []
        for each, names in self._kept():
            for parameter, state in each.state.items():
                for key, value in state.items():
                    if _is_tensor(value):
                        own = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0
                        found.append((f"{names[parameter]}/{key}", value, own))
        return found


def _room(parameter: Tensor, size: tuple[int, ...], dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    if size == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    on_device = size or group.get("fused") or group.get("capturable")
    return torch.zeros(size, dtype=dtype, device=parameter.device if on_device else "cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
