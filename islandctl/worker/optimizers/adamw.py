"""torch's AdamW (Loshchilov & Hutter 2019) over named parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from islandctl.config.recipe import Optimizer


class AdamW:
    """Decay only on matrices. Its state exists from the start (zeros)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> None:
        self.parameters = dict(parameters)
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            foreach=True,
        )
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def tensors(self) -> dict[str, Tensor]:
        """``<parameter>/exp_avg``, ``/exp_avg_sq``, ``/step``."""
        return {
            f"{name}/{key}": self.adamw.state[parameter][key]
            for name, parameter in self.parameters.items()
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
