"""The inner optimizer: which kind steps which parameter, its schedule and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islandctl.config.recipe import Optimizer, Training
from islandctl.worker.optimizers.adamw import AdamW
from islandctl.worker.optimizers.groups import is_matrix
from islandctl.worker.optimizers.muon import Muon
from islandctl.worker.optimizers.named_shampoo import NamedShampoo
from islandctl.worker.optimizers.soap import Soap


def learning_rate(step: float, training: Training) -> float:
    """The rate for the step that follows ``step`` finished ones of the run: linear warm-up, then decay to
    ``final · peak``. A cell that takes steps of its own stands at fractions of the run's."""
    peak, schedule, warmup = training.inner.lr, training.schedule, training.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.decay == "none":
        return peak
    done = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    fall = done if schedule.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
    return peak * (1 - (1 - schedule.final) * fall)


class Part(Protocol):
    """An optimizer of some of the parameters."""

    def step(self, lr: float) -> None:
        """One step from the parameters' gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """All its state, as the tensors themselves: the same keys at every step, to be filled in place."""


def parts(parameters: Mapping[str, nn.Parameter], recipe: Optimizer) -> list[Part]:
    """The optimizers that the recipe's ``kind`` means; norms, routers, embeddings and head are always AdamW's."""
    if recipe.kind == "adamw":
        return [AdamW(parameters, recipe)]
    if recipe.kind == "shampoo":
        return [NamedShampoo(parameters, recipe)]
    matrices = {name: p for name, p in parameters.items() if is_matrix(name, p.shape)}
    others = {name: p for name, p in parameters.items() if name not in matrices}
    if not matrices:
        return [AdamW(others, recipe)]
    first: Part = Muon(matrices, recipe) if recipe.kind == "muon" else Soap(matrices, recipe)
    return [first, AdamW(others, recipe)]


class InnerOptimizer:
    """The recipe's optimizer over named parameters, clipped by the norm over all of them.

    Its state exists from the start, under the parameters' names, so that a checkpoint has the same keys at every
    step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], training: Training) -> None:
        self.parameters = dict(parameters)
        self.training = training
        self.parts = parts(self.parameters, training.inner)

    def step(self, step: float) -> tuple[float, float]:
        """Clip, step and clear the gradients.

        Args:
            step: finished steps of the run before this one.

        Returns:
            The gradient's norm before clipping, and the learning rate.
        """
        rate = learning_rate(step, self.training)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.training.inner.clip, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        for part in self.parts:
            part.step(rate)
        for parameter in self.parameters.values():
            parameter.grad = None
        return float(norm), rate

    def tensors(self) -> dict[str, Tensor]:
        """The state as the tensors themselves, by ``<parameter>/<what>``: ``w/exp_avg``, ``w/step``, …

        What belongs to one rank's part of a sharded parameter ends in ``.rank-<n>``: Shampoo and SOAP precondition
        what a rank holds, so their state is bound to the number of ranks.
        """
        return {key: tensor for part in self.parts for key, tensor in part.tensors().items()}
