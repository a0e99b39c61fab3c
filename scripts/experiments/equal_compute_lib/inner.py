"""The inner optimizer of stacked cells: each cell's gradient is clipped and applied by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from islandctl.config.recipe import Optimizer, Schedule, Training
from islandctl.worker.optimizer import learning_rate
from islandctl.worker.optimizers import Shampoo, param_groups
from scripts.experiments.equal_compute_lib.model import Values
from scripts.experiments.equal_compute_lib.settings import Inner


class Stack:
    """C cells' values and their optimizer's state.

    Args:
        values: (C, *shape) each.
        inner: settings of the optimizer.
        steps: of the whole run, for the learning rate.
    """

    def __init__(self, values: Values, inner: Inner, steps: int) -> None:
        self.inner, self.steps = inner, steps
        self.values = {name: value.clone().requires_grad_() for name, value in values.items()}
        self.optimizer = _optimizer(self.values, inner)
        schedule = Schedule(warmup=int(inner.warmup * steps), decay="cosine", final=inner.final)
        self._training = Training(
            steps=steps, batch=1, sequence=2, optimizer=Optimizer(lr=inner.lr), schedule=schedule
        )

    def widen(self, cells: int) -> Stack:
        """``cells`` copies of this one cell, state of the optimizer included."""
        wide = Stack(
            {name: _repeat(value.detach(), cells) for name, value in self.values.items()}, self.inner, self.steps
        )
        for ours, theirs in zip(self.values.values(), wide.values.values(), strict=True):
            target = wide.optimizer.state[theirs]
            for key, part in self.optimizer.state[ours].items():
                wider = part if key == "step" else _repeat(part, cells)
                if key in target:
                    target[key].copy_(wider)
                else:
                    target[key] = wider.clone()
        return wide

    def step(self, loss: Tensor, done: int) -> None:
        """One inner step down the sum of the cells' losses.

        Args:
            done: finished steps before this one.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        self._clip()
        rate = learning_rate(done, self._training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _clip(self) -> None:
        grads = [value.grad for value in self.values.values() if value.grad is not None]
        square_C = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0)
        scale_C = (self.inner.clip / (square_C.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale_C.view(-1, *[1] * (grad.ndim - 1)))


def _optimizer(values: Values, inner: Inner) -> torch.optim.Optimizer:
    if inner.kind == "shampoo":
        groups = param_groups(values, weight_decay=inner.weight_decay, batch_dims=1)
        return Shampoo(groups, batch_dims=1, betas=inner.betas, refresh=inner.refresh)
    matrices = [value for value in values.values() if value.ndim > 2]
    vectors = [value for value in values.values() if value.ndim <= 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": inner.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=inner.betas,
        fused=True,
    )


def _repeat(part: Tensor, cells: int) -> Tensor:
    """``cells`` copies along the first dimension; the cell is the outermost of what the dimension numbers."""
    return part.repeat(cells, *[1] * (part.ndim - 1))
