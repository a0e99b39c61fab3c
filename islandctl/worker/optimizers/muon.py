"""torch's Muon (Jordan et al. 2024) with an own matrix for each stacked expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from islandctl.config.recipe import Optimizer
from islandctl.worker.optimizers.matrices import Matrices, matrices_of

MOMENTUM = 0.95
"""Torch's own default."""


class Muon:
    """Steps have AdamW's usual size (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one rate fits all."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> None:
        self.matrices = Matrices(parameters)
        self.muon: torch.optim.Optimizer = torch.optim.Muon(
            self.matrices.all(),
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            momentum=MOMENTUM if recipe.momentum is None else recipe.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.buffers = {name: torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
        for name, views in self.matrices.views.items():
            for view, buffer in zip(views, matrices_of(self.buffers[name]), strict=True):
                self.muon.state[view] = {"momentum_buffer": buffer}

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients."""
        self.matrices.take_gradients()
        for group in self.muon.param_groups:
            group["lr"] = lr
        self.muon.step()

    def tensors(self) -> dict[str, Tensor]:
        """``<parameter>/momentum_buffer``."""
        return {f"{name}/momentum_buffer": buffer for name, buffer in self.buffers.items()}
