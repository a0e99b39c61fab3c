"""What is trained, as a checkpoint takes it: model, optimizer, the script's own objects and the random states.

Keys: ``model/<parameter or buffer>``, ``optimizer/<parameter>/<what>``; under ``rank-<n>/`` what belongs to one rank:
``optimizer/…``, ``optimizer.json``, ``state/<name>``, ``rng/…``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from islandctl.errors import ConfigError
from islandctl.worker.objects import Stateful, put_together, split
from islandctl.worker.random_states import random_states, restore_random_states
from islandctl.worker.tensors import Shape
from islandctl.worker.torch_optimizer import OptimizerState

Model = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A module, or its parameters by name."""
OPTIMIZER_VALUES = "optimizer.json"


def named_parameters(model: Model) -> dict[str, Tensor]:
    """The parameters by name; what wrappers (DDP, ``torch.compile``) put before a name is taken away.

    Raises:
        ConfigError: there are none, or one has two names, or two have one, or it is no model at all.
    """
    if isinstance(model, nn.Module):
        pairs: Iterable[tuple[str, Tensor]] = model.named_parameters()
    else:
        pairs = model.items() if isinstance(model, Mapping) else model
    found: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for full, parameter in _checked(pairs):
        name = _bare(full)
        if name in found:
            raise ConfigError(f"attach: two parameters of the model are called '{name}'")
        if parameter in names:
            raise ConfigError(
                f"attach: '{names[parameter]}' and '{name}' are one parameter, which would be exchanged twice",
                hint="give it once; a module's named_parameters() does",
            )
        found[name], names[parameter] = parameter, name
    if not found:
        raise ConfigError("attach: the model has no parameters")
    return found


def _checked(pairs: Any) -> list[tuple[str, Tensor]]:
    found = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for each in found:
        if not (
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], Tensor)
        ):
            raise ConfigError(
                f"attach: a {type(each).__name__} is no parameter with its name",
                hint="attach(model, optimizer): the module, or its named_parameters()",
            )
    return found


def _bare(name: str) -> str:
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


class Trained:
    """Model, optimizer and objects of one rank.

    Args:
        model, optimizer: see ``islandctl.attach``.
        state: objects to take along, by name.

    Raises:
        ConfigError: the optimizer is not of this model, or an object's state cannot be written down.
    """

    def __init__(self, model: Model, optimizer: Any, state: Mapping[str, Stateful]) -> None:
        self.parameters = named_parameters(model)
        self._buffers: dict[str, Tensor] = {}
        if isinstance(model, nn.Module):
            kept = model.state_dict().keys()
            self._buffers = {_bare(name): buffer for name, buffer in model.named_buffers() if name in kept}
        self._optimizer = OptimizerState(optimizer, self.parameters)
        self._state = dict(state)
        self.device = next(iter(self.parameters.values())).device
        """Where this rank trains."""
        self._random: dict[str, Tensor] = {}
        self._objects()

    def tensors(self) -> dict[str, Tensor]:
        """Those of the whole cell, as they lie in memory."""
        held = {f"model/{name}": tensor.detach() for name, tensor in (self.parameters | self._buffers).items()}
        return held | {f"optimizer/{key}": tensor for key, tensor in self._optimizer.tensors().items()}

    def own(self) -> dict[str, Tensor]:
        """Those of this rank."""
        own = {f"optimizer/{key}": tensor for key, tensor in self._optimizer.own().items()}
        own |= split(self._optimizer.values(), OPTIMIZER_VALUES)
        return own | self._objects() | random_states(self.device)

    def _objects(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, each in self._state.items():
            found |= split(each.state_dict(), f"state/{name}")
        return found

    def targets(self, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """The tensors that a checkpoint with these tensors fills in place."""
        begin = "optimizer/"
        self._optimizer.prepare({key.removeprefix(begin): of for key, of in shapes.items() if key.startswith(begin)})
        return self.tensors()

    def take(self, own: Mapping[str, Tensor]) -> None:
        """Take over this rank's part, after ``targets`` were filled; the random states only with ``begin``."""
        begin = "optimizer/"
        mine = {key.removeprefix(begin): tensor for key, tensor in own.items() if key.startswith(begin)}
        self._optimizer.take(put_together(own, OPTIMIZER_VALUES), mine)
        for name, each in self._state.items():
            each.load_state_dict(put_together(own, f"state/{name}"))
        self._random = {key: tensor for key, tensor in own.items() if key.startswith("rng/")}

    def begin(self) -> None:
        """Set the random states of the checkpoint, if there was one: whatever was drawn since does not count."""
        if self._random:
            restore_random_states(self._random, self.device)
            self._random = {}
