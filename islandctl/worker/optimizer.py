"""The inner optimizer: AdamW (Loshchilov & Hutter 2019), its schedule and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islandctl.config.recipe import Training

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, training: Training) -> float:
    """The rate for the step that follows ``step`` finished ones: linear warm-up, then decay to ``final · peak``."""
    peak, schedule, warmup = training.inner.lr, training.schedule, training.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.decay == "none":
        return peak
    done = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    fall = done if schedule.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
    return peak * (1 - (1 - schedule.final) * fall)


class InnerOptimizer:
    """AdamW over named parameters; decay only on matrices, clipped by the norm over all of them.

    Its state exists from the start (zeros), under the parameters' names, so that a checkpoint has the same keys
    at every step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: Training) -> None:
        self.parameters = dict(parameters)
        self.training = training
        recipe = training.inner
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

    def step(self, step: int) -> tuple[float, float]:
        """Clip, step and clear the gradients.

        Args:
            step: finished steps before this one.

        Returns:
            The gradient's norm before clipping, and the learning rate.
        """
        rate = learning_rate(step, self.training)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.training.inner.clip, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return float(norm), rate

    def tensors(self) -> dict[str, Tensor]:
        """The state as the tensors themselves: ``<parameter>/exp_avg``, ``/exp_avg_sq``, ``/step``."""
        return {
            f"{name}/{key}": self.adamw.state[parameter][key]
            for name, parameter in self.parameters.items()
            for key in (*MOMENTS, "step")
        }
