"""The butterfly's arithmetic: pairs, mixing, and what repeated mixing does to the cells' values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from islandctl.errors import ConfigError
from islandctl.exchange import mixing
from islandctl.exchange.codecs import Key, codec_named, decode, encode
from islandctl.ledger.pairs import Pairing

POWERS = st.integers(1, 6).map(lambda bits: Pairing(1 << bits))
Told = Callable[[int, Tensor], Tensor]


def mix(values: list[Tensor], pairing: Pairing, window: int, told: Told, fragment: int = 0) -> list[Tensor]:
    """One round of all pairs; ``told`` is what a cell's partner decodes of its value."""
    said = [told(cell, value) for cell, value in enumerate(values)]
    others = [said[pairing.partner(cell, fragment, window)] for cell in range(pairing.num_cells)]
    return [
        torch.add(value, mixing.half_step(own, other)) for value, own, other in zip(values, said, others, strict=True)
    ]


def exactly(cell: int, value: Tensor) -> Tensor:
    return value


@given(POWERS, st.integers(0, 7), st.integers(0, 50))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_pairs_are_a_partition_and_every_bit_comes_equally_often(
    pairing: Pairing, fragment: int, window: int
) -> None:
    pairs = {pairing.pair(cell, fragment, window) for cell in range(pairing.num_cells)}
    assert sorted(cell for pair in pairs for cell in pair) == list(range(pairing.num_cells))
    for cell in range(pairing.num_cells):
        other = pairing.partner(cell, fragment, window)
        assert pairing.partner(other, fragment, window) == cell
        assert pairing.pair(other, fragment, window) == pairing.pair(cell, fragment, window)
    bits = [pairing.bit(fragment, window + number) for number in range(3 * pairing.num_bits)]
    assert all(bits.count(bit) == 3 for bit in range(pairing.num_bits))
    assert sorted(bits[: pairing.num_bits]) == list(range(pairing.num_bits))


@pytest.mark.parametrize(("num", "near"), [(0, "2"), (1, "2"), (3, "2 or 4"), (12, "8 or 16"), (63, "32 or 64")])
def test_other_numbers_are_refused_with_the_nearest(num: int, near: str) -> None:
    with pytest.raises(ConfigError, match=f"not {num}; nearest: {near}$"):
        Pairing(num)


@given(POWERS, st.integers(0, 2**32), st.floats(0, 10))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_the_mean_stays_whatever_the_codec_loses(pairing: Pairing, seed: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = list(torch.randn(pairing.num_cells, 20, dtype=torch.float64, generator=generator))
    mean = torch.stack(values).mean(0)

    def lossy(cell: int, value: Tensor) -> Tensor:
        return value + noise * torch.randn(value.shape, dtype=value.dtype, generator=generator)

    for window in range(2 * pairing.num_bits):
        values = mix(values, pairing, window, lossy)
        assert torch.allclose(torch.stack(values).mean(0), mean, rtol=0, atol=1e-12 * max(1.0, noise))


@given(POWERS, st.integers(0, 2**32), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_frozen_values_agree_after_k_rounds(pairing: Pairing, seed: int, fragment: int, window: int) -> None:
    values = list(torch.randn(pairing.num_cells, 9, dtype=torch.float64, generator=torch.manual_seed(seed)))
    mean = torch.stack(values).mean(0)
    for number in range(pairing.num_bits):
        values = mix(values, pairing, window + number, exactly, fragment)
    for value in values:
        assert torch.allclose(value, mean, rtol=0, atol=1e-12)


@given(POWERS, st.integers(0, 2**32))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_the_last_rounds_leave_equal_bits(pairing: Pairing, seed: int) -> None:
    """In fp32, where adding a half step would not."""
    values = list(torch.randn(pairing.num_cells, 33, generator=torch.manual_seed(seed)))
    for window in range(5, 5 + pairing.num_bits):
        values = [
            mixing.midpoint(value, values[pairing.partner(cell, 0, window)]) for cell, value in enumerate(values)
        ]
    assert all(torch.equal(value, values[0]) for value in values)


def test_the_variance_of_eight_cells_stays_at_half_of_a_windows_drift() -> None:
    """(σ²/N) Σ a·2^(k−1−a) over the bits a = 1 … k−1: ½σ² for N = 8. Coordinates are independent trials."""
    pairing, trials, windows = Pairing(8), 4000, 30
    generator = torch.Generator().manual_seed(11)
    values = list(torch.zeros(8, trials, dtype=torch.float64))
    seen = []
    for window in range(windows):
        values = [value + torch.randn(trials, dtype=torch.float64, generator=generator) for value in values]
        values = mix(values, pairing, window, exactly)
        if window >= 6:  # the beginning is forgotten after three windows
            stacked = torch.stack(values)
            seen.append((stacked - stacked.mean(0)).square().mean(0))
    of_trial = torch.stack(seen).mean(0)
    error = float(of_trial.std()) / trials**0.5
    assert abs(float(of_trial.mean()) - 0.5) < 5 * error
    assert error < 0.005


def test_references_and_residuals_bring_coded_values_together() -> None:
    """int8 with error feedback: partners share a reference bit for bit, and the rest shrinks round by round."""
    pairing, num_windows = Pairing(4), 12
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(512, generator=generator)
    values = [first + 0.1 * torch.randn(512, generator=generator) for _ in range(4)]
    mean = torch.stack(values).double().mean(0)
    reference = [[first, first] for _ in range(4)]
    residual = [[torch.zeros(512)] * 2 for _ in range(4)]
    apart = []
    for window in range(num_windows):
        bit, codec = pairing.bit(0, window), codec_named("int8")
        said = []
        for cell, value in enumerate(values):
            owed = mixing.owed(value, reference[cell][bit], residual[cell][bit])
            sent = decode(encode(codec, owed, Key(3, cell, 0, window, 0)))
            residual[cell][bit] = owed - sent
            said.append(mixing.told(reference[cell][bit], sent))
        for cell in range(4):
            other = said[pairing.partner(cell, 0, window)]
            values[cell] = values[cell] + mixing.half_step(said[cell], other)
            reference[cell][bit] = mixing.midpoint(said[cell], other)
        for cell in range(4):
            assert torch.equal(reference[cell][bit], reference[pairing.partner(cell, 0, window)][bit])
        stacked = torch.stack(values).double()
        apart.append(float((stacked - stacked.mean(0)).norm()))
        assert torch.allclose(stacked.mean(0), mean, rtol=0, atol=1e-6)
    assert apart[-1] < apart[1] < 0.02 * apart[0]
