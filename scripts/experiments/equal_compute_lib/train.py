"""One training run, from settings to its result."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.experiments.equal_compute_lib.exchange import CellsExchange, mean_of, spread
from scripts.experiments.equal_compute_lib.inner import Stack
from scripts.experiments.equal_compute_lib.model import bits_per_byte, initial, losses, shapes
from scripts.experiments.equal_compute_lib.settings import Run
from scripts.experiments.equal_compute_lib.text import batches, held_out

POINTS = 10
"""Evaluations on the way, evenly spread over the steps."""


def train(run: Run, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Carry the run out. The result depends on the settings alone, for one machine and torch version.

    Returns:
        ``bits_per_byte`` of the final values on held-out text, and what it took to get there.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    torch.set_num_threads(1)
    began, cpu = time.monotonic(), _cpu_s()
    model, sequence = run.model, run.model.sequence
    test_BS = held_out(run)
    stack = Stack(initial(model, run.seed), run.inner, run.steps)
    joint = run.joint if run.exchange is not None else run.steps
    first = run.batch // run.cells if run.alone else run.batch
    source = batches(run, batch=first, cells=1)
    exchange: CellsExchange | None = None
    curve: list[tuple[int, float]] = []
    train_loss = math.nan

    for step in range(1, run.steps + 1):
        if step == joint + 1 and run.exchange is not None:
            stack = stack.widen(run.cells)
            source = batches(run, batch=run.batch, cells=run.cells, skip=joint * run.batch)
            exchange = CellsExchange(stack.values, run.exchange, steps=run.steps - joint, seed=run.seed)
        text_CBS = next(source)
        nats_C, balance_C = losses(model, stack.values, text_CBS)
        stack.step((nats_C + model.balance * balance_C).sum(), step - 1)
        if exchange is not None:
            exchange.step([text_CBS.shape[1] * sequence] * run.cells)
        if step % max(1, run.steps // POINTS) == 0 and step < run.steps:
            train_loss = float(nats_C.detach().mean()) / math.log(2)
            if not math.isfinite(train_loss):
                raise FloatingPointError(f"step {step}: the loss is {train_loss}")
            curve.append((step, bits_per_byte(model, mean_of(stack.values), test_BS)[0]))
            tell(f"step {step}/{run.steps}: {curve[-1][1]:.4f} bits per byte, {time.monotonic() - began:.0f} s")

    apart, cells_end = spread(stack.values), bits_per_byte(model, stack.values, test_BS)
    if exchange is not None:
        exchange.finish()
    final = bits_per_byte(model, mean_of(stack.values), test_BS)[0]
    curve.append((run.steps, final))
    return {
        "bits_per_byte": final,
        "cells_before_end": cells_end,
        "spread_before_end": apart,
        "curve": curve,
        "bytes_up_per_cell": (exchange.bytes_up / run.cells if exchange else 0.0),
        "bytes_joint_per_cell": 0.0 if run.alone else 4.0 * _count(run) * joint * 2 * (1 - 1 / max(2, run.cells)),
        "cosine": _mean(exchange.cosines) if exchange else None,
        "parameters": _count(run),
        "cpu_s": _cpu_s() - cpu,
        "wall_s": time.monotonic() - began,
    }


def _count(run: Run) -> int:
    return sum(math.prod(shape) for shape in shapes(run.model).values())


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _cpu_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime
