"""What a checkpoint takes along of a loop that it does not know: any optimizer, any object, the random states."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from islandctl.errors import CheckpointError, ConfigError
from islandctl.worker import tensors as disk
from islandctl.worker.objects import put_together, split
from islandctl.worker.parallel import Ranks
from islandctl.worker.trained import Trained, named_parameters

from .small import model, one_step, same, values

ALONE = Ranks(0, 1, torch.device("cpu"))
KINDS = [
    lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    lambda net: torch.optim.ASGD(net.parameters(), lr=0.01),
    lambda net: torch.optim.RMSprop([{"params": [p]} for p in net.parameters()], lr=0.01, centered=True),
    lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
]


class Thing:
    """Any object with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save(trained: Trained, folder: Path) -> set[str]:
    folder.mkdir()
    disk.save(folder, trained.tensors() | {f"rank-0/{key}": tensor for key, tensor in trained.own().items()}, ALONE)
    return {path.name for path in folder.iterdir()}


def load(trained: Trained, folder: Path, files: set[str]) -> None:
    trained.take(disk.load(folder, trained.targets(disk.shapes(folder, files)), files, ALONE))


@pytest.mark.parametrize("kind", KINDS, ids=["momentum", "amsgrad", "adafactor", "asgd", "groups", "none"])
def test_a_new_optimizer_of_any_kind_goes_on_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    net = model()
    optimizer = kind(net)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    for step in range(3):
        one_step(net, optimizer, 0, step)
        schedule.step()
    files = save(Trained(net, optimizer, {"schedule": schedule}), tmp_path / "one")

    other = model(5)
    again = kind(other)
    scheduled = torch.optim.lr_scheduler.MultiStepLR(again, [2, 4])
    load(Trained(other, again, {"schedule": scheduled}), tmp_path / "one", files)
    assert same(values(net), values(other))
    for step in range(3, 6):
        assert one_step(net, optimizer, 0, step) == one_step(other, again, 0, step)
        schedule.step()
        scheduled.step()
    assert same(values(net), values(other))


def test_several_optimizers_buffers_and_names_without_wrappers(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        net = nn.ModuleDict({"module": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
        first, second = (list(part.parameters()) for part in net["module"])
        return net, [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(second, lr=0.1)]

    net, optimizers = made()
    assert list(named_parameters(net)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    net["module"](torch.randn(8, 4)).square().mean().backward()
    for each in optimizers:
        each.step()
    files = save(Trained(net, optimizers, {}), tmp_path / "one")
    other, again = made()
    load(Trained(other, again, {}), tmp_path / "one", files)
    assert same(dict(net.named_buffers()), dict(other.named_buffers()))
    assert again[0].state_dict()["state"].keys() == optimizers[0].state_dict()["state"].keys()


def test_a_parameter_that_two_optimizers_step_keeps_the_state_of_both(tmp_path: Path) -> None:
    """As an encoder that two objectives share."""

    def made() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        net = model()
        shared, one, other = (list(net[number].parameters()) for number in (0, 2, 4))
        return net, [
            torch.optim.SGD([*shared, *one], lr=0.1, momentum=0.9),
            torch.optim.SGD([*other, *shared], lr=0.05, momentum=0.5),
        ]

    def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        for number, each in enumerate(optimizers):
            net.zero_grad()
            one_step(net, each, number, step)

    net, optimizers = made()
    for step in range(3):
        train(net, optimizers, step)
    trained = Trained(net, optimizers, {})
    first, second = (each.state[net[0].bias]["momentum_buffer"] for each in optimizers)
    assert not torch.equal(first, second)
    kept = trained.tensors()
    assert torch.equal(kept["optimizer/0.bias/momentum_buffer"], first)
    assert torch.equal(kept["optimizer/0.bias@1/momentum_buffer"], second)

    other, again = made()
    load(Trained(other, again, {}), tmp_path / "one", save(trained, tmp_path / "one"))
    for step in range(3, 6):
        train(net, optimizers, step)
        train(other, again, step)
    assert same(values(net), values(other))


def test_the_random_states_are_set_when_the_loop_begins(tmp_path: Path) -> None:
    net = model()
    trained = Trained(net, torch.optim.SGD(net.parameters(), lr=0.1), {})
    files = save(trained, tmp_path / "one")
    drawn = (torch.rand(1).item(), random.random(), np.random.random())
    load(trained, tmp_path / "one", files)
    torch.rand(7)
    trained.begin()
    assert (torch.rand(1).item(), random.random(), np.random.random()) == drawn


def test_what_cannot_be_written_is_named_before_anything_is_trained() -> None:
    net = model()
    with pytest.raises(ConfigError, match=r"state/data/rows/1: a checkpoint cannot hold a builtins\.object"):
        Trained(net, torch.optim.SGD(net.parameters(), lr=0.1), {"data": Thing({"rows": [1, object()]})})
    with pytest.raises(ConfigError, match="a Thing is no torch optimizer"):
        Trained(net, Thing(), {})
    with pytest.raises(ConfigError, match="the model has no parameters"):
        named_parameters({})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_any_plain_state_comes_back_as_it_was(value: Any) -> None:
    assert put_together(split(value, "state/x"), "state/x") == value


def test_tensors_arrays_and_counters_come_back() -> None:
    value = {"a": [torch.arange(3), (np.arange(4.0), np.int64(3))], 5: Counter({7: 1}), "inf": float("inf")}
    parts = split(value, "state/x")
    assert "state/x/a/0" in parts
    back = put_together(parts, "state/x")
    assert torch.equal(back["a"][0], torch.arange(3))
    assert np.array_equal(back["a"][1][0], np.arange(4.0))
    assert (back["a"][1][1], back[5], back["inf"]) == (3, {7: 1}, float("inf"))
    with pytest.raises(CheckpointError, match="no whole state of 'state/y'"):
        put_together(parts, "state/y")
