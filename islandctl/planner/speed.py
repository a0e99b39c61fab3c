"""How long a step takes: a range from the accelerator's measured rate, or honestly unknown."""

from __future__ import annotations

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.catalogue import Accelerator
from islandctl.planner.parameters import Counts
from islandctl.planner.plan import CellPlan, Figure

UTILISATION = (0.30, 0.45)
"""Share of the measured matrix rate that training reaches (assumption). Public runs of an 8B model on H100: 0.41."""

LAUNCH_S = 2e-3
"""For each layer, forward and backward, in the worse case: its hundred or so small operations are started one after
another, each some 10 to 20 microseconds (assumption). A small model's step takes that long on any accelerator."""

NETWORK_SHARE = 0.6
"""Share of the stated bandwidth inside a site that collectives reach in the worse case (assumption)."""


def step_flops(recipe: Recipe, counts: Counts) -> float:
    """Operations of one step of one cell, forward and backward.

    6 a token and active parameter, and 6·s·d a token and layer for causal attention (12·s·d, half of it masked).
    """
    tokens = recipe.training.batch * recipe.training.sequence
    attention = 6.0 * recipe.decoder.layers * recipe.decoder.width * recipe.training.sequence
    return tokens * (6.0 * counts.active + attention)


def sharding_bytes(recipe: Recipe, counts: Counts, num_ranks: int) -> float:
    """Bytes that FSDP2 brings to each rank in one step: weights twice, gradients once."""
    weights = 2 if recipe.training.precision == "bfloat16" else 4
    return counts.total * (2.0 * weights + 4.0) * (num_ranks - 1) / num_ranks


def step_time(
    recipe: Recipe, counts: Counts, site: SiteProfile, accelerator: Accelerator, cell: CellPlan
) -> Figure | None:
    """Seconds of one step, or None where the accelerator's rate is not known (``cpu``).

    Low: the higher utilisation, and FSDP's traffic wholly hidden behind it. High: the lower one, a network at
    ``NETWORK_SHARE``, and nothing hidden; at least ``LAUNCH_S`` a layer.
    """
    if accelerator.matrix_flops is None:
        return None
    rate = accelerator.matrix_flops * cell.num_ranks
    fast, slow = (step_flops(recipe, counts) / (rate * share) for share in reversed(UTILISATION))
    traffic, words = _traffic_s(recipe, counts, site, accelerator, cell)
    low = max(fast, traffic)
    high = max(slow + traffic / NETWORK_SHARE, recipe.decoder.layers * LAUNCH_S)
    return Figure(
        value=(low + high) / 2,
        low=low,
        high=high,
        unit="s",
        formula=f"{step_flops(recipe, counts):.3g} FLOP / ({cell.num_ranks} × {accelerator.matrix_flops / 1e12:.0f} "
        f"TFLOP/s ({accelerator.matrix_source}) × {UTILISATION[0]} to {UTILISATION[1]}); {words}",
    )


def _traffic_s(
    recipe: Recipe, counts: Counts, site: SiteProfile, accelerator: Accelerator, cell: CellPlan
) -> tuple[float, str]:
    if cell.num_ranks == 1:
        return 0.0, "one rank: no traffic inside the cell"
    if len(cell.nodes) == 1:
        bandwidth, link = accelerator.link_bytes_per_s, "the node's links"
    else:
        bandwidth, link = (site.network.bandwidth / 8 if site.network else None), "network.bandwidth"
    if bandwidth is None:
        return 0.0, f"{link} not known: traffic inside the cell left out"
    volume = sharding_bytes(recipe, counts, cell.num_ranks)
    return volume / bandwidth, f"sharding {volume / 1e9:.3g} GB a rank over {link} at {bandwidth / 1e9:.3g} GB/s"


def tokens_per_s(recipe: Recipe, step: Figure | None) -> Figure | None:
    """Tokens a second of one cell, while nothing waits."""
    if step is None:
        return None
    tokens = recipe.training.batch * recipe.training.sequence
    return Figure(
        value=tokens / step.value,
        low=tokens / step.high,
        high=tokens / step.low,
        unit="tokens/s",
        formula=f"{tokens} tokens a step / step time",
    )
