"""torch's AdamW (Loshchilov & Hutter 2019) over named parameters.

Its function, and not its class: any class of torch's optimizers loads the compiler, half a second at every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from islandctl.config.recipe import Optimizer


class AdamW:
    """Decay only on matrices. Its state exists from the start (zeros)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> None:
        self.parameters, self.recipe = dict(parameters), recipe
        self.state = {
            name: {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }
            for name, parameter in self.parameters.items()
        }

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients."""
        ready = {name: parameter.ndim for name, parameter in self.parameters.items() if parameter.grad is not None}
        self._step([name for name, ndim in ready.items() if ndim >= 2], lr, decay=self.recipe.weight_decay)
        self._step([name for name, ndim in ready.items() if ndim < 2], lr, decay=0.0)

    @torch.no_grad()
    def _step(self, names: list[str], lr: float, *, decay: float) -> None:
        adamw(
            [self.parameters[name] for name in names],
            [cast(Tensor, self.parameters[name].grad) for name in names],
            [self.state[name]["exp_avg"] for name in names],
            [self.state[name]["exp_avg_sq"] for name in names],
            [],
            [self.state[name]["step"] for name in names],
            foreach=True,
            amsgrad=False,
            beta1=self.recipe.betas[0],
            beta2=self.recipe.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.recipe.eps,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """``<parameter>/exp_avg``, ``/exp_avg_sq``, ``/step``."""
        return {
            f"{name}/{key}": self.state[name][key]
            for name in self.parameters
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
