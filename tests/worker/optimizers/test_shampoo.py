"""Shampoo against a dense reference, stacked against separate, its fallbacks, resume, and what it is for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from islandctl.worker.optimizers import Shampoo, blocks, param_groups
from islandctl.worker.optimizers import roots as roots_module

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


def test_how_many_blocks_share_a_stack_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3, 4, 4), (4, 4), (2, 4, 4), (9, 4)]

    def run() -> list[Tensor]:
        parameters = [nn.Parameter(values(*shape, seed=1)) for shape in shapes]
        shampoo = Shampoo(parameters, lr=0.1, refresh=2, block=4)
        for step in range(5):
            for parameter in parameters:
                parameter.grad = gradients(*parameter.shape, seed=step)
            shampoo.step()
        return [parameter.detach() for parameter in parameters]

    many = run()
    monkeypatch.setattr(blocks, "STACK_VALUES", 64)
    for one, other in zip(many, run(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_bad_matrix_costs_its_own_block_only(caplog: pytest.LogCaptureFixture) -> None:
    good = nn.Parameter(values(3, 4, 4, seed=1))
    alone = nn.Parameter(good.detach().clone())
    bad = nn.Parameter(values(2, 4, 4, seed=2))
    both = Shampoo([{"params": [("good", good), ("bad", bad)]}], lr=0.1, refresh=2)
    only = Shampoo([alone], lr=0.1, refresh=2)
    for step in range(6):
        good.grad, bad.grad = gradients(3, 4, 4, seed=step), gradients(2, 4, 4, seed=50 + step)
        alone.grad = good.grad.clone()
        if step == 3:
            root = both.state[bad]["left_root.0"].clone()
            both.state[bad]["left.0"][1] = torch.nan
            with caplog.at_level("WARNING"):
                both.step()
            assert torch.equal(both.state[bad]["left_root.0"][1], root[1])
            assert not torch.equal(both.state[bad]["left_root.0"][0], root[0])
        else:
            both.step()
        only.step()
    assert both.failures == 2  # at steps 4 and 6: the mean of a factor keeps what is no number
    assert "left factor of bad (1 blocks)" in caplog.text
    assert bad.isfinite().all()
    torch.testing.assert_close(good, alone)  # products of other stacks may round otherwise


def test_without_any_root_the_step_is_adams(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise roots_module.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", never)
    ours, theirs = nn.Parameter(values(4, 4, seed=1)), nn.Parameter(values(4, 4, seed=1))
    shampoo = Shampoo([ours], lr=0.1, refresh=1, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        ours.grad = gradients(4, 4, seed=step)
        theirs.grad = ours.grad.clone()
        shampoo.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)
    assert shampoo.failures == 8


def test_a_decomposition_that_fails_in_float32_is_done_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.linalg.eigh
    asked = []

    def weak(matrix: Tensor) -> object:
        asked.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise roots_module.LinAlgError("did not converge")
        return exact(matrix)

    factor = gradients(3, 5, 5, seed=1, dtype=torch.float32)
    factor = factor @ factor.mT
    expected, _ = roots_module.inverse_roots(factor.double(), 1e-3)
    monkeypatch.setattr(torch.linalg, "eigh", weak)
    roots, good = roots_module.inverse_roots(factor, 1e-3)
    assert good.all()
    assert asked.count(torch.float64) == 3
    torch.testing.assert_close(roots.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_has_no_gradient_yet_starts_with_adams_step_and_stays_finite() -> None:
    """An expert that no token has reached has factors of zeros."""
    parameter = nn.Parameter(values(2, 3, 3, seed=1))
    start = parameter.detach().clone()
    shampoo = Shampoo([parameter], lr=0.1, refresh=1)
    for _ in range(3):
        parameter.grad = gradients(2, 3, 3, seed=1)
        parameter.grad[1] = 0.0
        shampoo.step()
    assert torch.equal(parameter[1], start[1])
    parameter.grad = gradients(2, 3, 3, seed=2)
    shampoo.step()
    assert parameter.isfinite().all()
    assert not torch.equal(parameter[1], start[1])
    assert shampoo.failures == 0


def test_state_dict_goes_on_exactly() -> None:
    shapes = [(5, 5), (3, 4, 6), (7,)]

    def begin() -> tuple[list[nn.Parameter], Shampoo]:
        parameters = [nn.Parameter(values(*shape, seed=1).float()) for shape in shapes]
        return parameters, Shampoo(parameters, lr=0.1, refresh=3, block=4, weight_decay=0.1)

    def run(parameters: list[nn.Parameter], shampoo: Shampoo, first: int, last: int) -> None:
        for step in range(first, last):
            for parameter in parameters:
                parameter.grad = values(*parameter.shape, seed=step).float()
            shampoo.step()

    straight, shampoo = begin()
    run(straight, shampoo, 0, 4)
    resumed, other = begin()
    run(resumed, other, 0, 1)
    other.load_state_dict(copy.deepcopy(shampoo.state_dict()))
    for one, two in zip(resumed, straight, strict=True):
        one.data.copy_(two.detach())
    run(straight, shampoo, 4, 9)
    run(resumed, other, 4, 9)
    assert all(torch.equal(one, two) for one, two in zip(straight, resumed, strict=True))


def test_what_it_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        Shampoo([nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="not 'sgd'"):
        Shampoo([nn.Parameter(torch.zeros(2, 2))], graft="sgd")
    shampoo = Shampoo([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match="when it is made"):
        shampoo.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


def test_a_matrix_problem_that_is_badly_scaled_in_rotated_axes_is_where_it_wins() -> None:
    """½·tr(Dᵀ·A·D·B), D = W − target, with condition numbers of 10³ each: AdamW can only scale the given axes."""

    def scaled(size: int, seed: int) -> Tensor:
        turned = torch.linalg.qr(values(size, size, seed=seed))[0]
        return turned @ torch.logspace(0, -3, size, dtype=torch.float64).diag() @ turned.mT

    def best(kind: type[torch.optim.Optimizer], **settings: object) -> float:
        ends = []
        for rate in (0.03, 0.1, 0.3, 1.0):
            w = nn.Parameter(torch.zeros(16, 12, dtype=torch.float64))
            optimizer = kind([w], lr=rate, betas=(0.9, 0.95), weight_decay=0.0, **settings)  # type: ignore[call-arg]
            for step in range(100):
                optimizer.param_groups[0]["lr"] = rate * (1 - step / 100)
                w.grad = a @ (w.detach() - target) @ b
                optimizer.step()
            rest = w.detach() - target
            ends.append(float((rest * (a @ rest @ b)).sum() / 2))
        return min(ends)

    a, b, target = scaled(16, 1), scaled(12, 2), values(16, 12, seed=3)
    assert best(Shampoo, refresh=5) < best(torch.optim.AdamW) / 10
