"""The experiment's exchange is the engine's: the same bits as islands that speak through a relay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from islandctl.config.codec import CodecName
from islandctl.config.exchange import Outer
from islandctl.errors import ConfigError
from islandctl.relay.inprocess import InProcessRelay
from scripts.experiments.equal_compute_lib import train as training
from scripts.experiments.equal_compute_lib.cache import Cache
from scripts.experiments.equal_compute_lib.exchange import CellsExchange, mean_of, spread
from scripts.experiments.equal_compute_lib.inner import Stack
from scripts.experiments.equal_compute_lib.model import bits_per_byte, initial, losses
from scripts.experiments.equal_compute_lib.settings import Anchored, Butterfly, Inner, Model, Run
from scripts.experiments.equal_compute_lib.text import batches
from tests.exchange.toy import CONFIG, RUN, Cell, together, toy_parameters, toy_settings, train

TINY = Model(layers=2, width=16, heads=2, hidden=8, experts=4, active=2, sequence=16)


def stacked(num_cells: int) -> dict[str, Tensor]:
    return {name: value.detach().repeat(num_cells, *[1] * value.ndim) for name, value in toy_parameters().items()}


def cell_of(values: dict[str, Tensor], cell: int) -> dict[str, Tensor]:
    return {name: value[cell] for name, value in values.items()}


@pytest.fixture
def islands() -> Iterator[list[Cell]]:
    cells: list[Cell] = []
    yield cells
    for cell in cells:
        cell.island.close()


@pytest.mark.parametrize(
    ("codec", "overlap", "apply", "steps"),
    [
        ("fp32", 0, "carry", 20),
        ("fp32", 2, "carry", 18),
        ("int8", 2, "carry", 20),
        ("int4", 0, "carry", 20),
        ("int4", 2, "carry", 18),
        ("int4", 2, "blend", 18),
        ("2bit", 2, "carry", 20),
    ],
)
def test_same_bits_as_the_engine(
    islands: list[Cell], codec: CodecName, overlap: int, apply: Literal["carry", "blend"], steps: int
) -> None:
    """Two cells: three windows, at 18 steps with a snapshot at the last one, and the final rounds; unequal tokens."""
    relay = InProcessRelay(RUN, CONFIG, ("east", "west"), 2)
    settings = toy_settings(
        codec=codec, overlap=overlap, apply=apply, outer=Outer(lr=0.8, momentum=0.6), late={"deadline": "60 s"}
    )
    islands += [Cell(relay, cell, settings, transport=relay.transport(cell), steps=steps) for cell in range(2)]
    values = stacked(2)
    mine = Anchored(
        kind="anchor",
        window=6,
        fragments=2,
        overlap=overlap,
        codec=codec,
        apply=apply,
        outer_lr=0.8,
        outer_momentum=0.6,
    )
    exchange = CellsExchange(values, mine, steps=steps, seed=3, chunk=256)
    for step in range(1, steps + 1):
        together(*[lambda cell=cell, step=step: cell.advance(step) for cell in islands])
        for cell in range(2):
            train(cell_of(values, cell), cell, step)
        exchange.step([100, 101])
        for cell, island in enumerate(islands):
            for name, value in island.values().items():
                assert torch.equal(value, values[name][cell]), f"step {step}, cell {cell}, {name}"
    together(*[cell.finish for cell in islands])
    exchange.finish()
    for cell, island in enumerate(islands):
        for name, value in island.values().items():
            assert torch.equal(value, values[name][cell]), f"end, cell {cell}, {name}"
    assert exchange.bytes_up < sum(cell.island.metrics()["bytes_up"] for cell in islands)


@pytest.mark.parametrize("kind", ["adamw", "shampoo"])
def test_stacked_cells_train_as_they_would_alone(kind: Literal["adamw", "shampoo"]) -> None:
    """Two cells side by side and each by itself: the same values, to fp32's rounding."""
    inner = Inner(kind=kind, lr=0.01, refresh=3)
    text = torch.randint(0, 256, (2, 3, 17), generator=torch.Generator().manual_seed(0))
    one = Stack(initial(TINY, 1), inner, 10)
    for step in range(3):
        nats_C, balance_C = losses(TINY, one.values, text[:1])
        one.step((nats_C + balance_C).sum(), step)
    both = one.widen(2)
    alone = [one.widen(1), one.widen(1)]
    for step in range(3, 7):
        for stack, part in ((both, text), (alone[0], text[:1]), (alone[1], text[1:])):
            nats_C, balance_C = losses(TINY, stack.values, part)
            stack.step((nats_C + balance_C).sum(), step)
    for name, value in both.values.items():
        for cell in range(2):
            torch.testing.assert_close(value[cell], alone[cell].values[name][0], rtol=1e-4, atol=1e-5)
    assert spread(both.values) > 0


def test_the_cells_share_the_ordinary_batch() -> None:
    run = Run(model=TINY, seed=5)
    (whole,) = next(batches(run, batch=8, cells=1))
    parts = next(batches(run, batch=8, cells=4))
    assert parts.shape == (4, 2, 17)
    assert sorted(map(tuple, whole.tolist())) == sorted(tuple(row) for part in parts.tolist() for row in part)
    source = batches(run, batch=8, cells=1)
    next(source)
    after = next(batches(run, batch=8, cells=4, skip=8))
    assert sorted(map(tuple, next(source)[0].tolist())) == sorted(
        tuple(row) for part in after.tolist() for row in part
    )


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_pairs_have_the_engines_bits(islands: list[Cell], codec: CodecName, overlap: int) -> None:
    """Four cells, 14 steps, two last rounds a fragment."""
    relay = InProcessRelay(RUN, CONFIG, ("a", "b", "c", "d"), 2, final_window=4)
    settings = toy_settings(
        mode="butterfly", window=4, codec=codec, overlap=overlap, outer=Outer(), late={"deadline": "60 s"}
    )
    for cell in range(4):
        islands.append(Cell(relay, cell, settings, transport=relay.transport(cell), num_cells=4, steps=14))
    values = stacked(4)
    mine = Butterfly(kind="butterfly", window=4, fragments=2, overlap=overlap, codec=codec)
    exchange = CellsExchange(values, mine, steps=14, seed=3, chunk=256)
    assert exchange.schedule.final_window == 4
    for step in range(1, 15):
        together(*[lambda cell=cell, step=step: cell.advance(step) for cell in islands])
        for cell in range(4):
            train(cell_of(values, cell), cell, step)
        exchange.step([1] * 4)
        for cell, island in enumerate(islands):
            for name, value in island.values().items():
                assert torch.equal(value, values[name][cell]), f"step {step}, cell {cell}, {name}"
    together(*[cell.finish for cell in islands])
    exchange.finish()
    for cell, island in enumerate(islands):
        for name, value in island.values().items():
            assert torch.equal(value, values[name][cell]), f"end, cell {cell}, {name}"


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_butterfly_keeps_the_mean_and_ends_in_agreement(codec: CodecName) -> None:
    values = stacked(4)
    exchange = CellsExchange(
        values, Butterfly(kind="butterfly", window=4, fragments=2, overlap=1, codec=codec), steps=12, seed=3
    )
    for cell in range(4):
        for value in values.values():
            value[cell] += 0.1 * cell
    before = mean_of(values)
    for _ in range(12):
        exchange.step([1] * 4)
    assert spread(values) < 0.01
    exchange.finish()
    for name, value in values.items():
        torch.testing.assert_close(value[0], before[name][0], rtol=0, atol=1e-5)
    assert spread(values) < 1e-6


def test_a_butterfly_of_three_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 3"):
        CellsExchange(stacked(3), Butterfly(kind="butterfly", fragments=2), steps=10, seed=0)


@pytest.mark.parametrize(
    "run",
    [
        Run(model=TINY, steps=12, batch=8, held_out=8),
        Run(model=TINY, steps=12, batch=8, held_out=8, cells=2, joint=2,
            exchange=Anchored(kind="anchor", window=5, fragments=2, overlap=2)),
        Run(model=TINY, steps=12, batch=8, held_out=8, cells=4,
            exchange=Butterfly(kind="butterfly", window=3, fragments=2)),
    ],
    ids=["ordinary", "anchored", "butterfly"],
)  # fmt: skip
def test_a_run_repeats_and_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    result = cache.result(run)
    assert 0 < result["bits_per_byte"] < 9
    assert training.train(run)["bits_per_byte"] == result["bits_per_byte"]
    monkeypatch.delattr("scripts.experiments.equal_compute_lib.cache.train")
    assert cache.result(run) == json.loads(json.dumps(result))
    assert Run.model_validate(run.told()) == run
    assert Run.model_validate({**run.told(), "seed": 1}).key != run.key


def test_bits_per_byte_of_a_model_that_knows_nothing() -> None:
    values = {name: torch.zeros_like(value) for name, value in initial(TINY, 0).items()}
    text = torch.randint(0, 256, (4, 17))
    assert bits_per_byte(TINY, values, text) == pytest.approx([math.log2(256)])
