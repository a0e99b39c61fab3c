"""Compute utilisation against bandwidth: the schedule of one step after another, played out over one link.

The model is that of Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): equal layers, the forward pass takes
a third of a step and the backward pass two thirds; a layer's reduction enters the link, one after another, as soon as
its backward pass is done; a later forward pass of that layer waits for it. Latency is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from islandctl.config.model import Model

LEAST_RATE, MOST_RATE = 1e-3, 1e30
"""Bits per second between which a rate is looked for."""
WANTED = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Shares of the time that the source's table asks for."""


class Method(Model):
    """A way to keep far replicas together."""

    name: str
    window: int
    """Steps in which every layer is reduced once; 1: data-parallel."""
    fragments: int
    """Parts of the model that are reduced one after another over the window."""
    overlap: int
    """Whole steps that a reduction may take beyond the step after it."""
    bits: float
    """On the link, a value."""


class Job(Model):
    """What is trained."""

    layers: int
    parameters: float
    """Of the whole model, spread evenly over the layers."""
    step_s: float
    """Seconds of a step that waits for nothing."""


def methods(layers: int, window: int, overlap: int = 1, few_bits: float = 4) -> tuple[Method, ...]:
    """The published five. Fragments hold three layers each, or one where there are fewer than three."""
    fragments = min(window, max(1, layers // 3))
    return (
        Method(name="data-parallel", window=1, fragments=1, overlap=0, bits=16),
        Method(name="diloco", window=window, fragments=1, overlap=0, bits=16),
        Method(name="streaming", window=window, fragments=fragments, overlap=0, bits=16),
        Method(name="streaming-overlap", window=window, fragments=fragments, overlap=overlap, bits=16),
        Method(name="streaming-overlap-4bit", window=window, fragments=fragments, overlap=overlap, bits=few_bits),
    )


def utilisation(method: Method, job: Job, *, bits_per_s: float) -> float:
    """Share of the time in which the accelerators compute, in the steady state.

    Args:
        bits_per_s: of the link, in each direction.
    """
    layers, step_s = job.layers, job.step_s
    layer_s = job.parameters / layers * method.bits / bits_per_s
    due_layers = _layers_by_step(method, layers)
    forward_s, backward_s = step_s / 3 / layers, 2 * step_s / 3 / layers
    warm_up = _whole_windows(method, 4)
    end = warm_up + _whole_windows(method, 8)
    clock = link_free = begin = 0.0
    awaited: dict[int, list[tuple[int, float]]] = {}
    now = 0
    for step in _eventful_steps(method, due_layers, warm_up, end):
        clock += (step - now) * step_s
        now = step
        if step == warm_up:
            begin = clock
        if step == end:
            break
        waited = 0.0
        for layer, ready in sorted(awaited.pop(step, ())):
            waited = max(waited, ready - (clock + layer * forward_s))
        clock += waited
        backward = clock + step_s / 3
        for layer in due_layers.get(step % method.window, ()):
            link_free = max(link_free, backward + (layers - layer) * backward_s) + layer_s
            awaited.setdefault(step + 1 + method.overlap, []).append((layer, link_free))
    return min(1.0, (end - warm_up) * step_s / (clock - begin))


def _whole_windows(method: Method, least_steps: int) -> int:
    return method.window * math.ceil(least_steps / method.window)


def _layers_by_step(method: Method, layers: int) -> dict[int, list[int]]:
    """For a step of the window the layers that are reduced after it, last layer first: layer l is in fragment
    l mod P, and fragment p has its turn ⌊p·W/P⌋ steps into the window."""
    turn: dict[int, list[int]] = {}
    for layer in reversed(range(layers)):
        turn.setdefault(layer % method.fragments * method.window // method.fragments, []).append(layer)
    return turn


def _eventful_steps(method: Method, due: Mapping[int, object], warm_up: int, end: int) -> list[int]:
    """Steps in which something is sent or awaited; between them nothing happens, however long a window is."""
    starts = range(0, end, method.window)
    steps = {start + offset + later for start in starts for offset in due for later in (0, 1 + method.overlap)}
    return sorted(step for step in {*steps, warm_up, end} if step <= end)


def bandwidth_for(wanted: float, method: Method, job: Job, *, precision: float = 1.01) -> float:
    """The least bits per second at which ``utilisation`` reaches ``wanted``, within a factor of ``precision``.

    Args:
        wanted: less than 1, which no finite link reaches where something is not overlapped.
    """
    guess = job.parameters * method.bits / (method.window * job.step_s)
    rate = least_rate(lambda rate: utilisation(method, job, bits_per_s=rate), wanted, guess, precision=precision)
    assert rate is not None, "an endless rate computes all the time"
    return rate


def least_rate(
    share: Callable[[float], float], wanted: float, guess: float = 1e9, *, precision: float = 1.01
) -> float | None:
    """The least rate at which ``share``, which grows with it, reaches ``wanted``. None: not at any rate."""
    low = high = guess
    while share(high) < wanted:
        if high > MOST_RATE:
            return None
        low, high = high, high * 4
    while low > LEAST_RATE and share(low) >= wanted:
        low, high = low / 4, low
    while high / low > precision:
        middle = math.sqrt(low * high)
        if share(middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


def first_reaching(wanted: float, rates: Sequence[float], shares: Sequence[float]) -> float | None:
    """The first of ``rates`` whose share is at least ``wanted``; None when none is."""
    return next((rate for rate, share in zip(rates, shares, strict=True) if share >= wanted), None)
