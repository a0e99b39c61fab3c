"""Checkpoints and failures: how large, how long, how often, and what a failure costs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner import optimizer_state
from islandctl.planner.catalogue import CPU
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.memory import WEIGHT_BYTES, state_bytes
from islandctl.planner.parameters import Counts
from islandctl.planner.plan import Figure

GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
"""Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100. 50,676 h."""
RENTED_FACTOR = (3.0, 4.0, 5.0)
"""Times as many failures on rented machines that nobody has burnt in (advice of operators; assumption)."""
OUTAGE_SPREAD = (0.4, 1.0, 3.0)
"""Times ``failures.outage``, from the quick to the slow one in ten (assumption)."""
WRITER_BYTES_PER_S = (1e9, 150e6)
"""Of each rank where the storage's rate is not known (assumption): a local disk, or what BLOOM's 384 ranks reached on
a shared one, 2.3 TB in 40 s."""
WRITE_SHARE = 0.6
"""Of the stated storage rate that is reached in the worse case (assumption)."""
FLIGHT_SAVED_BYTES = 9
"""A parameter of a fragment in flight: fp32 vector and snapshot, and its packet of about a byte."""


def saved_bytes(parameters: int, *, weights: float = WEIGHT_BYTES, optimizer: float = 8) -> float:
    """Bytes of a checkpoint of weights and optimizer, per parameter as given."""
    return parameters * (weights + optimizer)


def checkpoint_bytes(recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], num_ranks: int) -> int:
    """One cell's checkpoint: fp32 weights, inner optimizer's state, the exchange's state and what is in flight."""
    inner = WEIGHT_BYTES * counts.total + optimizer_state.cell_bytes(recipe.decoder, recipe.training.inner, num_ranks)
    if recipe.exchange.mode == "none":
        return inner
    gap = recipe.exchange.window / recipe.exchange.fragments
    in_flight = min(recipe.exchange.fragments, int(recipe.exchange.overlap / gap) + (recipe.exchange.overlap > 0))
    largest = max(fragment.values for fragment in fragments)
    return inner + state_bytes(recipe.exchange) * counts.total + FLIGHT_SAVED_BYTES * in_flight * largest


def write_time(size: float, site: SiteProfile, cells_on_site: int, num_ranks: int) -> Figure:
    """Seconds in which one cell's checkpoint is on disk; all cells of a site write at once."""
    if site.storage.write is not None:
        best = size * cells_on_site / site.storage.write
        worst = best / WRITE_SHARE
        words = f"{size * cells_on_site / 1e9:.3g} GB / storage.write {site.storage.write / 1e9:.3g} GB/s"
    else:
        best, worst = (size / num_ranks / rate for rate in WRITER_BYTES_PER_S)
        words = f"{size / 1e9:.3g} GB / {num_ranks} ranks of 0.15 to 1 GB/s; storage.write is not known"
    return Figure(value=(best + worst) / 2, low=best, high=worst, unit="s", formula=words)


def read_time(size: float, site: SiteProfile, cells_on_site: int, num_ranks: int) -> float:
    """Seconds in which one cell's checkpoint comes back."""
    rate = site.storage.read / cells_on_site if site.storage.read else num_ranks * WRITER_BYTES_PER_S[1]
    return size / rate


def failures_per_hour(sites: Iterable[SiteProfile]) -> Figure | None:
    """Failures an hour over all sites, each accelerator breaking by itself. None: no accelerator is known to break.

    256 accelerators of Llama 3's kind: one failure in 198 hours; rented, one in 40 to 66.
    """
    low = value = high = 0.0
    parts = []
    for site in sites:
        if site.gpu.type == CPU and site.failures.per_gpu is None:
            continue
        hours = site.failures.per_gpu / 3600 if site.failures.per_gpu is not None else GPU_HOURS_PER_FAILURE
        rate = site.gpu.count / hours
        less, usual, more = (
            RENTED_FACTOR if site.failures.rented and site.failures.per_gpu is None else (1.0, 1.0, 1.0)
        )
        low, value, high = low + less * rate, value + usual * rate, high + more * rate
        source = "failures.per_gpu" if site.failures.per_gpu is not None else "Llama 3"
        words = f"{site.name}: {site.gpu.count} / {hours:,.0f} h ({source})"
        parts.append(words + (f" × {less:g} to {more:g}, rented" if more > 1 else ""))
    if not parts:
        return None
    return Figure(value=value, low=low, high=high, unit="1/h", formula=_joined(parts))


def mean_time_between_failures(rate: Figure) -> Figure:
    """Seconds from one failure to the next."""
    return Figure(
        value=3600 / rate.value,
        low=3600 / rate.high,
        high=3600 / rate.low,
        unit="s",
        formula=f"1 / ({rate.formula})",
    )


def best_interval(write_s: float, between_failures_s: float) -> float:
    """Seconds of training between checkpoints that lose least: √(2·δ·MTBF) (Young 1974; Daly 2006, first order)."""
    return math.sqrt(2 * write_s * between_failures_s)


def lost_share(
    interval_s: float, write_s: float, read_s: float, mtbf: Figure | None, outage_s: float = 300.0
) -> Figure:
    """Share of the time that is no progress: writing, work done again (half an interval a failure), and restarts.

    (δ/T + (T/2 + restart + read) / MTBF), over one plus that.
    """
    restart = tuple(outage_s * times for times in OUTAGE_SPREAD)
    low, value, high = (
        (write_s / interval_s, 0.0, 0.0)
        if mtbf is None
        else (
            (interval_s / 2 + restart[0] + read_s) / mtbf.high + write_s / interval_s,
            (interval_s / 2 + restart[1] + read_s) / mtbf.value + write_s / interval_s,
            (interval_s / 2 + restart[2] + read_s) / mtbf.low + write_s / interval_s,
        )
    )
    if mtbf is None:
        value = high = low
    return Figure(
        value=value / (1 + value),
        low=low / (1 + low),
        high=high / (1 + high),
        unit="",
        formula=f"checkpoints {write_s:.3g} s every {interval_s:.3g} s; each failure: half of that again, "
        f"{restart[0]:.0f} to {restart[2]:.0f} s to start, {read_s:.3g} s to read",
    )


def _joined(parts: list[str]) -> str:
    return " + ".join(parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more sites"])
