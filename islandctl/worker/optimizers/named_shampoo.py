"""Our Shampoo as the recipe sets it, over named parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from islandctl.config.recipe import Optimizer
from islandctl.worker.optimizers.groups import param_groups
from islandctl.worker.optimizers.matrices import of_rank
from islandctl.worker.optimizers.shampoo import Shampoo


class NamedShampoo:
    """All parameters: matrices preconditioned, the others on the AdamW inside."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> None:
        self.parameters = dict(parameters)
        given = {
            "block": recipe.block,
            "refresh": recipe.refresh,
            "graft": recipe.graft,
            "damping": recipe.damping,
            "factor_beta": recipe.factor_beta,
        }
        self.shampoo = Shampoo(
            param_groups(self.parameters, weight_decay=recipe.weight_decay),
            lr=recipe.lr,
            betas=recipe.betas,
            eps=recipe.eps,
            **{key: value for key, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients."""
        for group in self.shampoo.param_groups:
            group["lr"] = lr
        self.shampoo.step()

    def tensors(self) -> dict[str, Tensor]:
        """``<parameter>/step``, ``/exp_avg``, …; of matrices by block: ``/left.0``, ``/left_root.0``, …"""
        tensors = {}
        for name, parameter in self.parameters.items():
            for key, tensor in self.shampoo.state[parameter].items():
                rank = of_rank(parameter) if "." in key else ""
                tensors[f"{name}/{key}{rank}"] = tensor
        return tensors
