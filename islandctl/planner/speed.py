"""How long a step takes: a roofline of matrix rate, memory and the site's own network, or honestly unknown."""

from __future__ import annotations

from islandctl.config.model import Model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.activations import LOGIT_BYTES, block_bytes
from islandctl.planner.catalogue import Accelerator
from islandctl.planner.parameters import Counts, kv_width, padded
from islandctl.planner.plan import CellPlan, Figure

EFFICIENCY = {"dense": (0.42, 0.67), "moe": (0.25, 0.40)}
"""Share of the matrix rate that a model's own products reach (assumption). Dense: an 8B model on H100 lies at 0.43
to 0.6, Llama 3 405B (arXiv 2407.21783, table 4) at 0.48 to 0.54, Megatron's 145B to 1T on A100 (arXiv 2104.04473) at
0.55 to 0.60. Mixtures: smaller products, uneven experts; DeepSeek-V3 (arXiv 2412.19437) at about 0.3."""

EASIER = {"A100-SXM-80": 1.12}
"""Times ``EFFICIENCY``, of accelerators whose memory and links are fast beside their matrix rate. A100: Llama 2's
whole trainings lie at 0.47 to 0.5, benchmarks of llm-foundry and torchtitan at 0.6 to 0.81: up to a tenth faster."""

TOUCHED = 5
"""Times that a kept value crosses the memory bus: written and read forward, read backward, its gradient written and
read (assumption: operations between products are fused about as often as they keep values of their own)."""

OPTIMIZER_BYTES = 28
"""A parameter at the optimizer's step: weight, gradient and two moments read, weight and moments written, fp32."""

LAUNCH_S = 2e-3
"""For each layer, forward and backward, in the worse case: its hundred or so small operations are started one after
another, each some 10 to 20 microseconds (assumption). A small model's step takes that long on any accelerator."""

NETWORK_SHARE = 0.65
"""Share of the stated bandwidth inside a site that collectives reach in the worse case (assumption)."""


class Work(Model):
    """What one step of one cell asks for, over all its ranks."""

    flops: float
    """The model's own, by which MFU is counted."""
    recomputed_flops: float
    fp8_flops: float
    """Those of ``flops`` and ``recomputed_flops`` that fp8 would take over: the blocks' products with weights."""
    memory_bytes: float
    """Over the accelerators' memory buses."""


def step_work(recipe: Recipe, counts: Counts) -> Work:
    """Count one step, forward and backward.

    Per token: 6 FLOP an active parameter, and 6·s·d a layer for causal attention (12·s·d, half of it masked; Kaplan
    et al. 2020, PaLM appendix B). Computed again with ``selective``: every second product, 2·(d·k + d² + A·d·h) a
    layer; with ``full``: the whole forward pass of the blocks, a third of their FLOP.
    """
    model, training = recipe.decoder, recipe.training
    tokens = float(training.batch * training.sequence)
    products = 6.0 * (counts.active - counts.head)
    attention = 6.0 * model.layers * model.width * training.sequence
    active = model.active_experts or 1
    again = {
        "none": (0.0, 0.0),
        "selective": (
            2.0 * model.layers * model.width * (kv_width(model) + model.width + active * model.hidden),
            0.0,
        ),
        "full": (products / 3, attention / 3),
    }[training.recompute]
    kept = model.layers * block_bytes(model, training.precision, "none") + LOGIT_BYTES * model.vocabulary
    return Work(
        flops=tokens * (products + attention + 6.0 * counts.head),
        recomputed_flops=tokens * sum(again),
        fp8_flops=tokens * (products + again[0]),
        memory_bytes=tokens * TOUCHED * kept + OPTIMIZER_BYTES * counts.total,
    )


def efficiency(recipe: Recipe, accelerator: Accelerator) -> tuple[float, float]:
    """Worst and best share of the matrix rate that the model's products reach there."""
    easier = EASIER.get(accelerator.name, 1.0)
    worst, best = EFFICIENCY[recipe.decoder.kind]
    return worst * easier, best * easier


def sharding_bytes(recipe: Recipe, num_ranks: int, num_groups: int) -> float:
    """Bytes that FSDP2 over ``num_ranks`` brings in one step to each of ``num_groups`` equal groups of them: weights
    twice, gradients once, without what lies in the group."""
    weights = 2 if recipe.training.precision == "bfloat16" else 4
    return padded(recipe.decoder, num_ranks) * (2.0 * weights + 4.0) * (num_groups - 1) / num_groups


def step_time(
    recipe: Recipe,
    counts: Counts,
    site: SiteProfile,
    accelerator: Accelerator,
    cell: CellPlan,
    *,
    fp8: bool = False,
) -> Figure | None:
    """Seconds of one step, or None where the accelerator's rate is not known (``cpu``).

    matrix FLOP / (rate · efficiency) + memory bytes / memory bandwidth, on every rank at once. Low: the higher
    efficiency. High: the lower one, a network at ``NETWORK_SHARE``; at least ``LAUNCH_S`` a layer. FSDP's traffic
    runs beside the arithmetic, except one layer's, for which there is nothing to hide behind. ``measured.step`` of
    the profile takes the place of all this.
    """
    if site.measured.step is not None:
        step = site.measured.step
        return Figure(
            value=step,
            low=step,
            high=step,
            unit="s",
            formula=f"measured.step of {site.measured.source}",
            assumed=False,
        )
    if accelerator.matrix_flops is None:
        return None
    work = step_work(recipe, counts)
    rank_s = _matrix_s(work, accelerator, fp8=fp8) / cell.num_ranks
    memory_s = _memory_s(work, accelerator) / cell.num_ranks
    worst, best = efficiency(recipe, accelerator)
    traffic, words = traffic_s(recipe, site, accelerator, cell)
    slow_traffic, layers = traffic / NETWORK_SHARE, recipe.decoder.layers
    low = max(rank_s / best + memory_s, traffic) + traffic / layers
    high = max(max(rank_s / worst + memory_s, slow_traffic) + slow_traffic / layers, layers * LAUNCH_S)
    return Figure(
        value=(low + high) / 2,
        low=low,
        high=high,
        unit="s",
        formula=f"{work.flops:.3g} FLOP ({work.recomputed_flops:.2g} more computed again) / ({cell.num_ranks} × "
        f"{accelerator.matrix_flops / 1e12:.0f} TFLOP/s ({accelerator.matrix_source}) × {worst:.2g} to {best:.2g}) + "
        f"memory {memory_s:.2g} s; {words}",
    )


def _matrix_s(work: Work, accelerator: Accelerator, *, fp8: bool) -> float:
    """Seconds of one rank alone at the full matrix rate."""
    assert accelerator.matrix_flops is not None
    flops = work.flops + work.recomputed_flops
    if not fp8 or accelerator.fp8_flops is None:
        return flops / accelerator.matrix_flops
    return (flops - work.fp8_flops) / accelerator.matrix_flops + work.fp8_flops / accelerator.fp8_flops


def _memory_s(work: Work, accelerator: Accelerator) -> float:
    """Seconds of one rank alone at the full memory rate; 0 where that is unknown."""
    return work.memory_bytes / accelerator.memory_bytes_per_s if accelerator.memory_bytes_per_s else 0.0


def arithmetic_s(recipe: Recipe, counts: Counts, accelerator: Accelerator, cell: CellPlan) -> float:
    """Seconds of a step that products (at the middle of their efficiency) and memory take by themselves."""
    work, (worst, best) = step_work(recipe, counts), efficiency(recipe, accelerator)
    matrix = _matrix_s(work, accelerator, fp8=False) * (1 / worst + 1 / best) / 2
    return (matrix + _memory_s(work, accelerator)) / cell.num_ranks


def traffic_s(recipe: Recipe, site: SiteProfile, accelerator: Accelerator, cell: CellPlan) -> tuple[float, str]:
    """Seconds of FSDP's traffic at the full rate of what is narrower, and which that is.

    Inside a node all of a rank's part passes the links between its accelerators. Between nodes a ring crosses each
    node's border once, and a node's accelerators share that: each carries ``1 / ranks of the node`` of what comes to
    the node. (NCCL reports the same: its bus bandwidth over nodes is that of all of a node's adapters together.)
    """
    if cell.num_ranks == 1:
        return 0.0, "one rank: no traffic inside the cell"
    num_nodes, per_node = len(cell.nodes), min(node.num_ranks for node in cell.nodes)
    ways: list[tuple[float, str]] = []
    missing = []
    if per_node > 1:
        volume, links = sharding_bytes(recipe, cell.num_ranks, cell.num_ranks), accelerator.link_bytes_per_s
        if links is None:
            missing.append("the node's links")
        else:
            ways.append(
                (volume / links, f"{volume / 1e9:.3g} GB a rank over the node's links at {links / 1e9:.3g} GB/s")
            )
    if num_nodes > 1:
        volume, network = sharding_bytes(recipe, cell.num_ranks, num_nodes) / per_node, site.network
        if network is None:
            missing.append("network.bandwidth")
        else:
            bandwidth = network.bandwidth / 8 / network.oversubscription
            words = f"{volume / 1e9:.3g} GB a rank between {num_nodes} nodes over network.bandwidth"
            if network.oversubscription > 1:
                words += f" / oversubscription {network.oversubscription:g}"
            ways.append((volume / bandwidth, f"{words} at {bandwidth / 1e9:.3g} GB/s"))
    left_out = f"{' and '.join(missing)} not known: its traffic left out" if missing else ""
    if not ways:
        return 0.0, left_out
    seconds, words = max(ways)
    return seconds, f"sharding {words}" + (f"; {left_out}" if left_out else "")


def bus_bytes_per_s(site: SiteProfile, accelerator: Accelerator, per_node: int) -> float | None:
    """Bus bandwidth of a collective over nodes that take part with ``per_node`` accelerators each; as NCCL counts it.

    What ``traffic_s`` reckons with: a node's accelerators together, or the links inside it where they are narrower.
    None: network.bandwidth is not known.
    """
    if site.network is None:
        return None
    border = per_node * site.network.bandwidth / 8 / site.network.oversubscription
    inside = accelerator.link_bytes_per_s if per_node > 1 else None
    return border if inside is None else min(border, inside)


def utilisation(
    recipe: Recipe, counts: Counts, accelerator: Accelerator, cell: CellPlan, step: Figure
) -> Figure | None:
    """Model FLOPs utilisation: the model's own FLOP over what the data sheet promises. None: no data sheet."""
    if accelerator.peak_flops is None or step.low <= 0:
        return None
    ideal = step_work(recipe, counts).flops / (cell.num_ranks * accelerator.peak_flops)
    return Figure(
        value=ideal / step.value,
        low=ideal / step.high,
        high=ideal / step.low,
        unit="",
        formula=f"model FLOP a step / ({cell.num_ranks} × {accelerator.peak_flops / 1e12:.0f} TFLOP/s of the data "
        "sheet) / step time",
        assumed=step.assumed,
    )


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
        assumed=step.assumed,
    )
