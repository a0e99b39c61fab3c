"""Shampoo: each matrix's gradient is scaled by inverse roots of its row and column covariances.

Sources: Gupta et al. 2018 (arXiv 1802.09568), algorithm 1; Shi et al. 2023, Distributed Shampoo (arXiv 2309.06497):
blocking, moving averages, bias correction, grafting, roots refreshed every few steps, decoupled decay.

For a block G of a gradient at step t (from 1)::

    m ← β₁·m + (1 − β₁)·G        v ← β₂·v + (1 − β₂)·G²
    L ← β₃·L + (1 − β₃)·G·Gᵀ     R ← β₃·R + (1 − β₃)·Gᵀ·G
    L̃, R̃ ← (L/(1 − β₃ᵗ) + damping·λ_max·I)^(−¼), R alike      every `refresh` steps
    A = m̂ / (√v̂ + eps)           Adam's step, with m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)
    U = L̃·m̂·R̃                    grafted: U ← U·‖A‖/‖U‖; until there are roots U = A
    W ← W − lr·(weight_decay·W + U)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from islandctl.worker.optimizers.blocks import Scratch, Stack, local, stacks
from islandctl.worker.optimizers.roots import inverse_roots

log = logging.getLogger(__name__)


class Shampoo(torch.optim.Optimizer):
    """Blocked Shampoo with Adam's step lengths; what is no matrix is on AdamW.

    The last two dimensions of a parameter are a matrix, all before them only number matrices: stacked experts
    (E, in, out), or whole models stacked, (C, E, in, out), are stepped exactly as so many separate matrices.

    All state exists from the start, as plain tensors in ``state[parameter]``: views that ``copy_`` may fill. A step
    is a function of state, gradients and parameters only. Of parameters that FSDP2 has sharded each rank
    preconditions its own rows (of stacked experts: its own experts), without any communication; so the blocks, and
    the result, depend on the number of ranks.

    Args:
        params: parameters, (name, parameter) pairs, or groups; each argument below may differ by group.
        lr: with grafting, what one would give AdamW.
        betas: β₁ of the momentum, β₂ of the second moment that grafting needs.
        factor_beta: β₃ of the factors L and R; None: β₂.
        eps: Adam's.
        damping: added to the factors, relative to their largest eigenvalue (see ``roots.py``).
        weight_decay: decoupled.
        block: largest side of a block.
        refresh: steps from one computation of the roots to the next; the first comes after so many steps.
        graft: ``adam``: each block's step has the length of Adam's. ``none``: Shampoo's own.
        precondition: False: AdamW for the whole group.
        batch_dims: so many leading dimensions number copies of a parameter; of what is left, less than two
            dimensions are no matrix.

    Raises:
        ValueError: a parameter that is neither float32 nor float64, or an unknown ``graft``.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        factor_beta: float | None = None,
        eps: float = 1e-8,
        damping: float = 1e-6,
        weight_decay: float = 0.0,
        block: int = 1024,
        refresh: int = 10,
        graft: str = "adam",
        precondition: bool = True,
        batch_dims: int = 0,
    ) -> None:
        defaults = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        super().__init__(params, defaults)
        self.failures = 0
        """Roots that could not be computed, here and since the start of this process; the last good ones stayed."""
        self._num_steps = torch.tensor(0.0)
        self._scratch = Scratch()
        self._stacks: list[Stack] = []
        self._views: dict[Tensor, dict[str, Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            if group["graft"] not in ("adam", "none"):
                raise ValueError(f"graft is 'adam' or 'none', not '{group['graft']}'")
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise ValueError(f"Shampoo needs float32 or float64 parameters, not {parameter.dtype}")
            matrices = [parameter for parameter in group["params"] if _is_matrix(parameter, group)]
            self._stacks += stacks(index, matrices, group["block"])
            self._views |= {parameter: {"step": self._num_steps} for parameter in matrices}
            for parameter in _others(group):
                self.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.detach()),
                    "exp_avg_sq": torch.zeros_like(parameter.detach()),
                }
        for stack in self._stacks:
            for tile in stack.tiles:
                self._views[tile.parameter] |= stack.state(tile)
        self.state.update({parameter: dict(views) for parameter, views in self._views.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor does: blocks are stacked over all parameters of a group."""
        if hasattr(self, "_stacks"):
            raise ValueError("Shampoo takes all its parameters when it is made")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but into the tensors that are there."""
        super().load_state_dict(state_dict)
        for parameter, views in self._views.items():
            for key, view in views.items():
                view.copy_(self.state[parameter][key])
            self.state[parameter] = dict(views)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. A matrix without a gradient counts as one whose gradient is zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._num_steps += 1
        step = int(self._num_steps)
        for stack in self._stacks:
            self._step_matrices(stack, self.param_groups[stack.group], step)
        for group in self.param_groups:
            self._step_others(group)
        return loss

    def _step_matrices(self, stack: Stack, group: dict[str, Any], step: int) -> None:
        beta_1, beta_2 = group["betas"]
        beta_3 = beta_2 if group["factor_beta"] is None else group["factor_beta"]
        grad, mean, update, own = self._scratch.like(stack.exp_avg, 4)
        stack.gather(_grad, out=grad)
        stack.exp_avg.lerp_(grad, 1 - beta_1)
        stack.exp_avg_sq.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
        stack.left.baddbmm_(grad, grad.mT, beta=beta_3, alpha=1 - beta_3)
        stack.right.baddbmm_(grad.mT, grad, beta=beta_3, alpha=1 - beta_3)
        if step % group["refresh"] == 0:
            self._refresh(stack, group, 1 - beta_3**step)

        torch.div(stack.exp_avg, 1 - beta_1**step, out=mean)
        torch.div(stack.exp_avg_sq, 1 - beta_2**step, out=update).sqrt_().add_(group["eps"])
        torch.div(mean, update, out=update)
        if step >= group["refresh"]:
            torch.bmm(stack.left_root, mean, out=grad)
            torch.bmm(grad, stack.right_root, out=own)
            length = torch.linalg.vector_norm(own, dim=(1, 2), keepdim=True)
            known = length.isfinite() & (length > 0)
            if group["graft"] == "adam":
                own.mul_(torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True) / length)
            torch.where(known, own, update, out=update)
        if group["weight_decay"]:
            stack.scale_parameters(1 - group["lr"] * group["weight_decay"])
        stack.add_to_parameters(update, -group["lr"])

    def _refresh(self, stack: Stack, group: dict[str, Any], correction: float) -> None:
        for side, factor, root in (
            ("left", stack.left, stack.left_root),
            ("right", stack.right, stack.right_root),
        ):
            fresh, good = inverse_roots(factor / correction, group["damping"])
            root.copy_(fresh.where(good[:, None, None], root))
            bad = (~good).nonzero().flatten().tolist()
            if bad:
                self.failures += len(bad)
                log.warning(
                    "no inverse root of the %s factor of %s; the last one stays", side, self._where(stack, bad)
                )

    def _where(self, stack: Stack, bad: Iterable[int]) -> str:
        """How many blocks of which parameter."""
        group = self.param_groups[stack.group]
        names = group.get("param_names") or [
            f"parameter {i} of group {stack.group}" for i in range(len(group["params"]))
        ]
        name = {id(parameter): name for parameter, name in zip(group["params"], names, strict=True)}
        owners = (next(tile for tile in stack.tiles if tile.start <= index < tile.end) for index in bad)
        counts = Counter(name[id(tile.parameter)] for tile in owners)
        return ", ".join(f"{name} ({count} blocks)" for name, count in counts.items())

    def _step_others(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in _others(group) if parameter.grad is not None]
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [cast(Tensor, parameter.grad) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _is_matrix(parameter: Tensor, group: dict[str, Any]) -> bool:
    return bool(group["precondition"]) and parameter.ndim - int(group["batch_dims"]) >= 2


def _others(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if not _is_matrix(parameter, group)]


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
