"""Shampoo against a dense reference, stacked against separate, its fallbacks, resume, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from islandctl.worker.optimizers import Shampoo, param_groups

from .reference import Reference


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Correlated rows and columns of unequal size, as real gradients have them."""
    rows, columns = shape[-2:]
    left = values(rows, rows, seed=11, dtype=dtype) * torch.linspace(0.1, 2.0, rows, dtype=dtype)
    right = values(columns, columns, seed=12, dtype=dtype) * torch.linspace(0.1, 2.0, columns, dtype=dtype)
    return left @ values(*shape, seed=seed, dtype=dtype) @ right


@pytest.mark.parametrize("graft", ["adam", "none"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((6, 6), 1024), ((5, 9), 1024), ((7, 10), 4), ((8, 3), 4), ((1, 6), 4), ((3, 5, 7), 4), ((2, 3, 4, 6), 1024)],
)
def test_the_steps_are_those_of_the_dense_reference(shape: tuple[int, ...], block: int, graft: str) -> None:
    settings = {"eps": 1e-8, "damping": 1e-4, "refresh": 3}
    start = values(*shape, seed=1)
    parameter = nn.Parameter(start.clone())
    ours = Shampoo(
        [parameter],
        lr=0.05,
        betas=(0.8, 0.9),
        factor_beta=0.7,
        weight_decay=0.1,
        block=block,
        graft=graft,
        **settings,  # type: ignore[arg-type]
    )
    references = [
        Reference(
            matrix, lr=0.05, weight_decay=0.1, block=block, beta1=0.8, beta2=0.9, beta3=0.7, graft=graft == "adam",
            **settings,
        )
        for matrix in start.reshape(-1, *shape[-2:]).numpy()
    ]  # fmt: skip
    for step in range(11):
        gradient = gradients(*shape, seed=100 + step)
        parameter.grad = gradient.clone()
        ours.step()
        for reference, part in zip(references, gradient.reshape(-1, *shape[-2:]).numpy(), strict=True):
            reference.step(part)
        expected = np.stack([reference.matrix for reference in references]).reshape(shape)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-9, atol=1e-11)


def test_in_float32_the_reference_is_met_to_rounding() -> None:
    shape = (24, 40)
    start = values(*shape, seed=1, dtype=torch.float32)
    parameter = nn.Parameter(start.clone())
    ours = Shampoo([parameter], lr=0.01, betas=(0.9, 0.95), damping=1e-3, refresh=4, block=16)
    reference = Reference(
        start.numpy(), lr=0.01, weight_decay=0.0, block=16, beta1=0.9, beta2=0.95, beta3=0.95, eps=1e-8,
        damping=1e-3, refresh=4, graft=True,
    )  # fmt: skip
    for step in range(20):
        gradient = gradients(*shape, seed=step, dtype=torch.float32)
        parameter.grad = gradient.clone()
        ours.step()
        reference.step(gradient.numpy())
    moved = np.abs(reference.matrix - start.numpy()).max()
    assert np.abs(parameter.detach().numpy() - reference.matrix).max() < 1e-3 * moved


def test_stacked_copies_step_as_separate_parameters() -> None:
    shapes = {"experts": (3, 8, 6), "matrix": (8, 6), "wide": (6, 20), "norm.weight": (8,), "embed": (9, 8)}
    copies = 4
    start = {name: values(copies, *shape, seed=index).float() for index, (name, shape) in enumerate(shapes.items())}
    together = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    apart = [{name: nn.Parameter(tensor[c].clone()) for name, tensor in start.items()} for c in range(copies)]
    settings = {"lr": 0.01, "refresh": 2, "block": 8}
    stacked = Shampoo(param_groups(together, weight_decay=0.1, batch_dims=1), batch_dims=1, **settings)  # type: ignore[arg-type]
    separate = [Shampoo(param_groups(each, weight_decay=0.1), **settings) for each in apart]  # type: ignore[arg-type]
    for step in range(7):
        for index, (name, parameter) in enumerate(together.items()):
            # Copies of very unequal size: a norm taken over all of them would show.
            scale = (10.0 ** torch.arange(copies)).view(-1, *[1] * len(shapes[name]))
            gradient = values(*parameter.shape, seed=1000 * step + index).float() * scale
            parameter.grad = gradient
            for c in range(copies):
                apart[c][name].grad = gradient[c].clone()
        stacked.step()
        for each in separate:
            each.step()
    for name, parameter in together.items():
        assert not torch.equal(parameter, start[name])
        for c in range(copies):
            torch.testing.assert_close(parameter[c], apart[c][name], rtol=1e-5, atol=1e-6)


def test_what_is_no_matrix_steps_as_adamw() -> None:
    shapes = {"blocks.0.ffn.router.weight": (4, 6), "embedding.weight": (5, 6), "head.weight": (5, 6), "norm": (6,)}
    start = {name: values(*shape, seed=index).float() for index, (name, shape) in enumerate(shapes.items())}
    ours = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    theirs = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    shampoo = Shampoo(param_groups(ours, weight_decay=0.1), lr=0.01, refresh=1)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        for name in shapes:
            ours[name].grad = values(*shapes[name], seed=step).float()
            theirs[name].grad = values(*shapes[name], seed=step).float()
        shampoo.step()
        adamw.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in shapes)
