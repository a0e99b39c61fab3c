"""A small model and its training, for attached loops: everything follows from seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import islandctl
from islandctl.config.exchange import Exchange

torch.set_num_threads(1)
STEPS = 12


def model(width: int = 5) -> nn.Sequential:
    """Three blocks (0, 2, 4), the same first values always."""
    generator = torch.Generator().manual_seed(7)
    layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layers


def batch(cell: int, step: int) -> tuple[Tensor, Tensor]:
    """The cell's own data."""
    generator = torch.Generator().manual_seed(1000 * cell + step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, cell: int, step: int) -> float:
    """Forward, backward, and the inner optimizer's step."""
    inputs, targets = batch(cell, step)
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values(net: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Equal keys and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def settings(**changes: Any) -> Exchange:
    """DiLoCo: exact values, no overlap, one fragment."""
    base = {"window": 4, "fragments": 1, "overlap": 0, "codec": "fp32", "outer": {"lr": 0.7, "momentum": 0.9}}
    return Exchange.model_validate(base | changes)


def train(
    exchange: Exchange, *, finish: bool = True, watch: Callable[[int, int, nn.Module], None] | None = None
) -> Callable[[Any], dict[str, Tensor]]:
    """A loop for ``run_cells``.

    Args:
        finish: whether the last exchange is made, after which all cells are equal.
        watch: called after every step with cell, steps done and the model.
    """

    def loop(place: Any) -> dict[str, Tensor]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with islandctl.attach(
            net, optimizer, exchange=exchange, steps=STEPS, tokens_per_step=8, transport=place
        ) as island:
            for step in island.steps():
                one_step(net, optimizer, place.cell, step)
                island.step()
                if watch is not None:
                    watch(place.cell, island.done, net)
            if finish:
                assert island.finish()
        return values(net)

    return loop
