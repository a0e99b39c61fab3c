"""AdamW's schedule, decay, clipping and state."""

import pytest
import torch
from torch import nn

from islandctl.config.recipe import Optimizer, Schedule, Training
from islandctl.worker.optimizer import InnerOptimizer, learning_rate


def training(*, steps: int = 10, schedule: Schedule | None = None, **optimizer: object) -> Training:
    return Training(
        steps=steps,
        batch=1,
        sequence=8,
        optimizer=Optimizer(**{"lr": 0.1, **optimizer}),  # type: ignore[arg-type]
        schedule=schedule or Schedule(warmup=0, decay="none"),
    )


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.55), ("linear", 0.55), ("none", 1.0)])
def test_the_rate_rises_and_falls(decay: str, middle: float) -> None:
    def rate(step: int) -> float:
        return learning_rate(step, plan)

    schedule = Schedule(warmup=10, decay=decay, final=0.1)  # type: ignore[arg-type]
    plan = training(steps=110, schedule=schedule, lr=1.0)
    assert rate(0) == pytest.approx(0.1)
    assert rate(9) == rate(10) == 1.0
    assert rate(60) == pytest.approx(middle)
    assert rate(110) == pytest.approx(0.1 if decay != "none" else 1.0)


def test_a_warmup_left_out_ends_within_a_short_run() -> None:
    short, long = training(schedule=Schedule(), lr=1.0), training(steps=1000, schedule=Schedule(), lr=1.0)
    assert [learning_rate(step, short) for step in (4, 9)] == pytest.approx([0.5, 1.0])
    assert [learning_rate(step, long) for step in (4, 99)] == pytest.approx([0.05, 1.0])


def test_only_matrices_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    inner = InnerOptimizer({"matrix": matrix, "vector": vector}, training(weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    inner.step(0)
    assert torch.equal(vector, torch.ones(2))
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))


def test_the_norm_is_told_before_clipping_and_clipped_over_all_parameters() -> None:
    one, two = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))
    inner = InnerOptimizer({"one": one, "two": two}, training(clip=1.0))
    one.grad, two.grad = torch.full((1, 1), 3.0), torch.full((1,), 4.0)
    norm, rate = inner.step(0)
    assert (norm, rate) == (pytest.approx(5.0), 0.1)
    torch.testing.assert_close(inner.tensors()["two/exp_avg"], torch.tensor([4.0 / 5 * 0.1]), rtol=1e-4, atol=0)


def test_state_restored_in_place_goes_on_exactly() -> None:
    def run(inner: InnerOptimizer, parameter: nn.Parameter, first: int, last: int) -> None:
        for step in range(first, last):
            parameter.grad = torch.full((3, 3), float(step % 3) - 0.7)
            inner.step(step)

    straight = nn.Parameter(torch.ones(3, 3))
    inner = InnerOptimizer({"p": straight}, training())
    run(inner, straight, 0, 3)
    kept = {key: tensor.clone() for key, tensor in inner.tensors().items()}
    resumed = nn.Parameter(straight.detach().clone())
    other = InnerOptimizer({"p": resumed}, training())
    for key, tensor in other.tensors().items():
        tensor.copy_(kept[key])
    run(inner, straight, 3, 6)
    run(other, resumed, 3, 6)
    assert torch.equal(straight, resumed)
