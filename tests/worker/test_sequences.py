"""Whole runs against sequences computed apart, in numpy's float32, from docs/exchange.md: equal bit for bit.

Overlap, unequal tokens, both ways to apply, every outer optimizer, coded packets with error feedback, and pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import islandctl
from islandctl.exchange.codecs import Key, decode, encode
from islandctl.exchange.codecs.registry import codec_named

Values = npt.NDArray[np.float32]
f32 = np.float32
STEPS, WINDOW, P, SEED = 47, 10, 2, 3
BIAS, SHAPE = 11, (5, 37)
"""Of each of the P blocks, which are the fragments: first its bias, which goes as bf16, then its matrix."""


def first_values() -> Values:
    return np.random.default_rng(1).standard_normal((P, BIAS + SHAPE[0] * SHAPE[1])).astype(f32)


def trained(cell: int, step: int, values: Values) -> Values:
    """One inner step, of which every bit follows from the values before."""
    drawn = np.random.default_rng([cell, step]).standard_normal(values.shape).astype(f32)
    return values - (values * f32(0.05) + drawn * f32(0.01))


class Expected:
    """All cells at once: ``value[cell, p]``, and ``unsent[cell, p]`` tokens, of fragment p."""

    def __init__(self, num_cells: int, exchange: dict[str, Any], tokens: list[int]) -> None:
        self.cells, self.exchange, self.tokens = range(num_cells), exchange, tokens
        self.value = np.stack([first_values() for _ in self.cells])
        self.unsent = np.zeros((num_cells, P), dtype=int)
        self.flight: dict[int, Any] = {}
        self.start()

    def run(self) -> tuple[Values, Values]:
        """The values after every step but the last, and those of the end."""
        seen = []
        for step in range(1, STEPS + 1):
            for cell in self.cells:
                self.value[cell] = trained(cell, step, self.value[cell])
                self.unsent[cell] += self.tokens[cell]
            for p in range(P):
                for window in range(STEPS // WINDOW + 1):
                    begins = window * WINDOW + (p + 1) * WINDOW // P
                    if begins == step:
                        self.flight[p] = window, self.send(p, window)
                    if p in self.flight and min(begins + self.exchange["overlap"], STEPS) == step:
                        self.apply(p, *self.flight.pop(p))
            seen.append(self.value.copy())
        self.end(-(-STEPS // WINDOW))
        return np.stack(seen[:-1]), self.value

    def coded(self, vector: Values, cell: int, p: int, window: int) -> Values:
        name = self.exchange["codec"]
        parts = [(vector[:BIAS], "fp32" if name == "fp32" else "bf16"), (vector[BIAS:], name)]
        sent = [
            decode(encode(codec_named(codec), torch.from_numpy(part.copy()), Key(SEED, cell, p, window, chunk)))
            for chunk, (part, codec) in enumerate(parts)
        ]
        return np.concatenate([part.numpy() for part in sent])

    def start(self) -> None: ...
    def send(self, p: int, window: int) -> Any: ...
    def apply(self, p: int, window: int, sent: Any) -> None: ...
    def end(self, window: int) -> None: ...


class TwoSite(Expected):
    """DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), delayed Nesterov (2401.09135, c = 0)."""

    def start(self) -> None:
        self.anchor, self.left = first_values(), np.zeros_like(self.value)
        self.momentum, self.sum, self.held = np.zeros_like(self.anchor), np.zeros_like(self.anchor), [0] * P

    def send(self, p: int, window: int) -> Any:
        sent = []
        for cell in self.cells:
            snapshot = self.value[cell, p].copy()
            vector = self.left[cell, p] * f32(self.exchange.get("feedback", 1)) + (self.anchor[p] - snapshot)
            sent.append((vector, self.coded(vector, cell, p, window), snapshot))
        tokens, self.unsent[:, p] = self.unsent[:, p].tolist(), 0
        return sent, tokens

    def mean(self, sent: Any, tokens: list[int]) -> Values:
        weights = [f32(n / sum(tokens)) if any(tokens) else f32(1 / len(tokens)) for n in tokens]
        total = sent[0][1] * weights[0]
        for (_, each, _), weight in zip(sent[1:], weights[1:], strict=True):
            total = total + each * weight
        return total

    def apply(self, p: int, window: int, flown: Any) -> None:
        sent, tokens = flown
        self.outer(p, self.mean(sent, tokens))
        for cell, (vector, decoded, snapshot) in enumerate(sent):
            left, value = vector - decoded, self.value[cell, p]
            if "alpha" in self.exchange:
                alpha, rest = f32(self.exchange["alpha"]), f32(1 - self.exchange["alpha"])
                self.value[cell, p] = value * alpha + self.anchor[p] * rest
                self.left[cell, p] = left * rest + self.left[cell, p] * alpha
            else:
                self.value[cell, p] = self.anchor[p] + (value - snapshot)
                self.left[cell, p] = left

    def outer(self, p: int, mean: Values) -> None:
        outer = self.exchange["outer"]
        if outer["kind"] == "average":
            self.anchor[p] -= mean
            return
        lr, mu, every = f32(outer["lr"]), f32(outer["momentum"]), outer.get("delay", 1)
        self.held[p] += 1
        self.sum[p] += mean
        move = mean * f32(1 / every)
        if self.held[p] == every:
            self.momentum[p] = self.momentum[p] * mu + self.sum[p] * f32(1 / every)
            move = move + self.momentum[p] * mu
            self.sum[p], self.held[p] = 0, 0
        self.anchor[p] -= move * lr

    def end(self, window: int) -> None:
        self.exchange = self.exchange | {"codec": "fp32"}
        for p in range(P):
            self.anchor[p] -= self.mean(*self.send(p, window))
            self.value[:, p] = self.anchor[p]


class Butterfly(Expected):
    """θᵢ ← θᵢ + ½(x̂ⱼ − x̂ᵢ), on references that pairs share."""

    def start(self) -> None:
        self.bits = len(self.cells).bit_length() - 1
        self.reference = np.stack([[first_values() for _ in range(self.bits)] for _ in self.cells])
        self.left = np.zeros_like(self.reference)

    def send(self, p: int, window: int) -> Any:
        bit, sent = (window + p) % self.bits, []
        for cell in self.cells:
            left = self.left[cell, bit, p] * f32(self.exchange.get("feedback", 1))
            vector = (self.value[cell, p] - self.reference[cell, bit, p]) + left
            sent.append((vector, self.coded(vector, cell, p, window)))
        return sent

    def apply(self, p: int, window: int, sent: Any) -> None:
        bit = (window + p) % self.bits
        told = [self.reference[cell, bit, p] + sent[cell][1] for cell in self.cells]
        for cell in self.cells:
            partner = cell ^ 1 << bit
            self.value[cell, p] += (told[partner] - told[cell]) * f32(0.5)
            self.reference[cell, bit, p] = (told[cell] + told[partner]) * f32(0.5)
            self.left[cell, bit, p] = sent[cell][0] - sent[cell][1]

    def end(self, window: int) -> None:
        for number in range(window, window + self.bits):
            for p in range(P):
                partners = [cell ^ 1 << (number + p) % self.bits for cell in self.cells]
                self.value[:, p] = (self.value[:, p] + self.value[partners, p]) * f32(0.5)


def found(num_cells: int, exchange: dict[str, Any], tokens: list[int]) -> tuple[Values, Values]:
    def loop(place: Any) -> tuple[Values, Values]:
        first = torch.from_numpy(first_values())
        model = {f"blocks.{p}.weight": first[p, BIAS:].clone().view(SHAPE) for p in range(P)}
        model |= {f"blocks.{p}.bias": first[p, :BIAS].clone() for p in range(P)}

        def values() -> Values:
            flat = {name: value.flatten() for name, value in model.items()}
            rows = [torch.cat([flat[f"blocks.{p}.bias"], flat[f"blocks.{p}.weight"]]) for p in range(P)]
            return torch.stack(rows).numpy()

        seen, island = [], islandctl.attach(model, None, transport=place, steps=STEPS, seed=SEED)
        for step in island.steps():
            new = torch.from_numpy(trained(place.cell, step + 1, values()))
            for p in range(P):
                model[f"blocks.{p}.bias"].copy_(new[p, :BIAS])
                model[f"blocks.{p}.weight"].copy_(new[p, BIAS:].view(SHAPE))
            island.step(tokens=tokens[place.cell])
            seen.append(values())
        assert island.finish()
        return np.stack(seen[:-1]), values()

    cells = islandctl.run_cells(loop, num_cells, islandctl.Exchange(**exchange))
    return np.stack([seen for seen, _ in cells], axis=1), np.stack([end for _, end in cells])


def hold(kind: type[Expected], exchange: dict[str, Any], tokens: list[int]) -> None:
    exchange = {"window": WINDOW, "fragments": P, "codec": "fp32", **exchange}
    seen, end = found(len(tokens), exchange, tokens)
    expected, last = kind(len(tokens), exchange, tokens).run()
    unequal = [step + 1 for step in range(STEPS - 1) if not np.array_equal(seen[step], expected[step])]
    assert unequal == []
    assert np.array_equal(end, last)


NESTEROV = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
DELAYED = {"kind": "delayed", "lr": 0.7, "momentum": 0.9, "delay": 3}


@pytest.mark.parametrize(
    ("exchange", "tokens"),
    [
        ({"overlap": 0, "outer": NESTEROV}, [1, 1]),
        ({"overlap": 3, "outer": NESTEROV}, [1, 2, 5]),
        ({"overlap": 9, "outer": {"kind": "average"}}, [1, 1]),
        ({"overlap": 3, "outer": DELAYED}, [3, 1]),
        ({"overlap": 4, "outer": NESTEROV, "codec": "int8"}, [1, 1]),
        ({"overlap": 4, "outer": NESTEROV, "codec": "int4", "feedback": 0.9}, [1, 3]),
        ({"overlap": 4, "outer": NESTEROV, "codec": "2bit", "feedback": 0.95}, [1, 1]),
        ({"overlap": 7, "outer": NESTEROV, "codec": "int4", "apply": "blend", "alpha": 0.3}, [1, 1]),
    ],
)
def test_cells_that_share_an_anchor(exchange: dict[str, Any], tokens: list[int]) -> None:
    hold(TwoSite, exchange, tokens)


@pytest.mark.parametrize(
    ("num_cells", "exchange"),
    [
        (2, {"overlap": 0}),
        (4, {"overlap": 3, "codec": "int4"}),
        (8, {"overlap": 9, "codec": "int8", "feedback": 0.9}),
    ],
)
def test_cells_that_mix_in_pairs(num_cells: int, exchange: dict[str, Any]) -> None:
    hold(Butterfly, {"mode": "butterfly", **exchange}, [1] * num_cells)
