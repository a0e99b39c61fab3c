"""Every kind of the recipe: learns, has all its state from the start, resumes bit for bit; also over two ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from islandctl.config.recipe import Optimizer
from islandctl.errors import ConfigError
from islandctl.worker import tensors as disk
from islandctl.worker.cell import Cell
from islandctl.worker.optimizer import InnerOptimizer
from islandctl.worker.optimizers import soap
from islandctl.worker.optimizers.matrices import Matrices
from islandctl.worker.trained import Trained

from ..test_cell import ALONE, made
from .sharded import AFTER, BEFORE, KINDS, SHAPES, SPAWN, rank_main, training, values


def cell(folder: Path, kind: str) -> Cell:
    refresh = {} if kind in ("adamw", "muon") else {"refresh": 4}
    return made(folder, training={"optimizer": {"kind": kind, "lr": 3e-3, **refresh}})


def tensors(one: Cell) -> dict[str, torch.Tensor]:
    """Model and optimizer, as a checkpoint has them."""
    return Trained(one.model, one.inner, {}).tensors()


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    straight = cell(tmp_path, kind)
    names = tensors(straight).keys()
    before = straight.evaluate()
    for step in range(6):
        straight.train_step(step)
    disk.save(tmp_path / "saved", tensors(straight), ALONE)
    losses = [straight.train_step(step).loss for step in range(6, 14)]
    assert straight.evaluate() < before - 2
    assert tensors(straight).keys() == names

    resumed = cell(tmp_path, kind)
    resumed.sequences.take(6 * 4)
    disk.load(tmp_path / "saved", tensors(resumed), {file.name for file in (tmp_path / "saved").iterdir()}, ALONE)
    assert [resumed.train_step(step).loss for step in range(6, 14)] == losses
    assert all(torch.equal(tensor, tensors(resumed)[name]) for name, tensor in tensors(straight).items())


@pytest.mark.slow
def test_two_ranks_step_their_own_parts_as_parameters_by_themselves_and_come_back(tmp_path: Path) -> None:
    processes = [SPAWN.Process(target=rank_main, args=(rank, 2, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    for kind in KINDS:
        for rank in range(2):
            result = torch.load(tmp_path / f"{kind}-{rank}", weights_only=True)
            parts = {name: part for name in SHAPES if (part := shard(values(name, -1), rank)).numel()}
            parameters = {name: nn.Parameter(part.clone()) for name, part in parts.items()}
            inner = InnerOptimizer(parameters, training(kind))
            for step in range(BEFORE + AFTER):
                for name, parameter in parameters.items():
                    parameter.grad = shard(values(name, step), rank).clone()
                inner.step(step)
            for name, parameter in parameters.items():
                torch.testing.assert_close(result[f"straight/{name}"], parameter.detach(), msg=f"{kind} {name}")
                assert not torch.equal(result[f"straight/{name}"], parts[name])
            assert all(torch.equal(result[f"straight/{name}"], result[f"resumed/{name}"]) for name in SHAPES)


def shard(tensor: Tensor, rank: int) -> Tensor:
    rows = math.ceil(tensor.shape[0] / 2)
    return tensor[rows * rank : rows * (rank + 1)]


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_stacked_experts_step_as_separate_matrices(kind: str) -> None:
    stacked = nn.Parameter(values("gate", -1))
    apart = {f"gate.{e}": nn.Parameter(values("gate", -1)[e].clone()) for e in range(4)}
    one, other = InnerOptimizer({"gate": stacked}, training(kind)), InnerOptimizer(apart, training(kind))
    for step in range(7):
        stacked.grad = values("gate", step)
        for e, parameter in enumerate(apart.values()):
            parameter.grad = values("gate", step)[e].clone()
        one.step(step)
        other.step(step)
    torch.testing.assert_close(stacked.detach(), torch.stack([parameter.detach() for parameter in apart.values()]))


def test_soap_moves_as_the_library_alone_would() -> None:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    ours, theirs = (nn.Parameter(values("q.weight", -1)) for _ in range(2))
    inner = InnerOptimizer({"q.weight": ours}, training("soap"))
    alone = pytorch_optimizer.SOAP(
        [theirs], lr=0.05, betas=(0.9, 0.95), weight_decay=0.1, precondition_frequency=3, eps=1e-8
    )
    for step in range(10):
        ours.grad, theirs.grad = values("q.weight", step), values("q.weight", step)
        inner.step(step)
        alone.step()
        torch.testing.assert_close(ours, theirs)


def test_a_side_too_large_for_soap_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "LARGEST", 5)
    parameter = nn.Parameter(values("q.weight", -1))  # 6 × 5
    inner = InnerOptimizer({"q.weight": parameter}, training("soap"))
    for step in range(8):
        parameter.grad = values("q.weight", step)
        inner.step(step)
    state = {key.partition("/")[2]: tuple(tensor.shape) for key, tensor in inner.tensors().items()}
    moments = {"exp_avg": (1, 6, 5), "exp_avg_sq": (1, 6, 5)}
    assert state == {"step": (), **moments, "right": (1, 5, 5), "right_basis": (1, 5, 5)}
    assert parameter.isfinite().all()


def test_without_its_package_soap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match="needs the package pytorch-optimizer") as caught:
        InnerOptimizer({"q.weight": nn.Parameter(torch.zeros(2, 2))}, training("soap"))
    assert "islandctl[soap]" in (caught.value.hint or "")


def test_a_matrix_without_a_gradient_is_named() -> None:
    with pytest.raises(ValueError, match=r"'q\.weight' has no gradient"):
        Matrices({"q.weight": nn.Parameter(torch.zeros(2, 2))}).take_gradients()


def test_muons_momentum_reaches_its_matrices() -> None:
    recipe = training("muon").model_copy(update={"optimizer": Optimizer(kind="muon", lr=0.1, momentum=0.5, clip=9)})
    parameter = nn.Parameter(torch.zeros(2, 2))
    inner = InnerOptimizer({"q": parameter}, recipe)
    parameter.grad = torch.eye(2)
    inner.step(0)
    torch.testing.assert_close(inner.tensors()["q/momentum_buffer"], torch.eye(2) / 2)
