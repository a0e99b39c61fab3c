"""SOAP (Vyas et al. 2024, arXiv 2409.11321) from pytorch-optimizer, with an own matrix for each stacked expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from islandctl.config.recipe import Optimizer
from islandctl.errors import ConfigError
from islandctl.worker.optimizers.blocks import local
from islandctl.worker.optimizers.matrices import Matrices, matrices_of, of_rank

REFRESH = 10
"""The paper's own choice."""
LARGEST = 10_000
"""A side beyond this stays as it is (the library's own choice): its covariance would have 400 MB and more."""
PAIRS = (("GG", ("left", "right")), ("Q", ("left_basis", "right_basis")))
"""The library's lists of two matrices, and our names of their members."""


class Soap:
    """The library makes its state at the first step, and new tensors for it at every refresh. Here it has a fixed
    place from the start (zeros), which ``tensors`` tells and from which every step begins.

    Raises:
        ConfigError: pytorch-optimizer is not installed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> None:
        try:
            from pytorch_optimizer import SOAP
        except ImportError as error:
            raise ConfigError(
                "training.optimizer.kind: soap needs the package pytorch-optimizer, which is not installed here",
                hint="pip install 'islandctl[soap]' into the workers' environment; launch builds one that has it",
            ) from error
        self.matrices = Matrices(parameters)
        self.soap: torch.optim.Optimizer = SOAP(
            self.matrices.all(),
            lr=recipe.lr,
            betas=recipe.betas,
            shampoo_beta=recipe.factor_beta,
            weight_decay=recipe.weight_decay,
            precondition_frequency=recipe.refresh or REFRESH,
            max_precondition_dim=LARGEST,
            eps=recipe.eps,
        )
        self.num_steps = torch.tensor(0.0)
        self.state = {name: _zeros(parameter) for name, parameter in parameters.items()}

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients. SOAP's first one only looks, and moves nothing."""
        self.matrices.take_gradients()
        begun = int(self.num_steps)
        for group in self.soap.param_groups:
            group["lr"], group["step"] = lr, begun
        group = self.soap.param_groups[0]
        self.soap.state.clear()
        if begun:
            for name, views in self.matrices.views.items():
                for view, state in zip(views, self._each(name), strict=True):
                    self.soap.state[view] = _for_library(state, group)
        self.soap.step()
        for name, views in self.matrices.views.items():
            for view, state in zip(views, self._each(name), strict=True):
                _keep(self.soap.state[view], state)
        self.num_steps += 1

    def _each(self, name: str) -> list[dict[str, Tensor]]:
        """The kept state of each of the parameter's matrices on this rank."""
        state = self.state[name]
        return [dict(zip(state, each, strict=True)) for each in zip(*map(torch.unbind, state.values()), strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """``<parameter>/exp_avg``, ``/exp_avg_sq``, ``/left``, ``/left_basis``, … ``/step``."""
        tensors = {f"{name}/step": self.num_steps for name in self.state}
        for name, state in self.state.items():
            rank = of_rank(self.matrices.parameters[name])
            tensors |= {f"{name}/{key}{rank}": tensor for key, tensor in state.items() if tensor.numel()}
        return tensors


def _zeros(parameter: Tensor) -> dict[str, Tensor]:
    """(K, …) each, for the K matrices of this rank's part."""
    values = local(parameter)
    rows, columns = values.shape[-2:]
    count = len(matrices_of(values))
    left, right = (size if size <= LARGEST else 0 for size in (rows, columns))
    sizes = {
        "exp_avg": (rows, columns),
        "exp_avg_sq": (rows, columns),
        "left": (left, left),
        "right": (right, right),
        "left_basis": (left, left),
        "right_basis": (right, right),
    }
    return {key: values.new_zeros((count, *size)) for key, size in sizes.items()}


def _for_library(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, Any]:
    beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    return {
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
        **{key: [state[name] for name in names] for key, names in PAIRS},
        "precondition_frequency": group["precondition_frequency"],
        "shampoo_beta": beta,
    }


def _keep(found: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    pairs = [(name, found[name]) for name in ("exp_avg", "exp_avg_sq")]
    pairs += [(name, tensor) for key, names in PAIRS for name, tensor in zip(names, found[key], strict=True)]
    for name, tensor in pairs:
        if tensor is not state[name] and state[name].numel():  # of a side beyond LARGEST the library has none
            state[name].copy_(tensor)
