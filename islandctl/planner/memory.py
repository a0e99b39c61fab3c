"""What a rank and a node must hold."""

from __future__ import annotations

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.parameters import Counts, kv_width
from islandctl.planner.plan import CellPlan, Figure

STATE_BYTES = 16
"""A parameter in training: fp32 weight, gradient and AdamW's two moments."""
ANCHOR_BYTES = 12
"""A parameter in the exchange: fp32 anchor, outer momentum and residual, on the processor."""
FLIGHT_BYTES = 16
"""A parameter of a fragment in flight: fp32 snapshot, tentative residual, and two decoded packets."""
PROCESS_BYTES = {"cpu": (0.25e9, 0.35e9, 0.5e9), "gpu": (1.0e9, 2.0e9, 4.0e9)}
"""What a worker holds before it trains (assumption): interpreter and torch; on a GPU context, NCCL, workspace."""
ACTIVATION_RANGE = (0.7, 1.0, 2.0)
"""Times the counted activations (assumption): freed early; as counted; uneven experts, temporaries, fragmentation."""


def state_bytes(counts: Counts, num_ranks: int) -> int:
    """Weights, gradients and optimizer of one rank; FSDP2 shards all of them evenly."""
    return -(-STATE_BYTES * counts.total // num_ranks)


def gathered_bytes(counts: Counts, num_ranks: int, precision: str) -> int:
    """What FSDP2 holds unsharded on one rank: two blocks' weights (one computes, one is fetched), one's gradients."""
    if num_ranks == 1:
        return 0
    return 3 * counts.layer * _compute_bytes(precision)


def activation_bytes(recipe: Recipe, num_ranks: int) -> int:
    """What one rank keeps for the backward pass, without recomputation.

    Values a token and block, with width d, key width k, hidden h, active experts A, experts E::

        7·d + 3·k            norms' inputs and outputs, q, k, v and rotated q, k, attention's output, residual
        A·(4·h + 2·d) + E    gate, up, silu, product; an expert's gathered input and output; router (dense: 4·h)

    and 3 values (fp32) a token and vocabulary entry for logits, their softmax and its gradient. Attention's scores
    are never stored (fused attention).
    """
    model, training = recipe.decoder, recipe.training
    tokens = training.batch * training.sequence // num_ranks
    per_block = 7 * model.width + 3 * kv_width(model)
    if model.experts and model.active_experts:
        per_block += model.active_experts * (4 * model.hidden + 2 * model.width) + model.experts
    else:
        per_block += 4 * model.hidden
    blocks = model.layers * per_block * _compute_bytes(training.precision)
    return tokens * (blocks + 3 * 4 * model.vocabulary)


def exchange_bytes(recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], num_ranks: int) -> int:
    """Processor memory of one rank for the exchange: the state of its chunks, and the fragments in flight."""
    if recipe.exchange.mode == "none":
        return 0
    gap = recipe.exchange.window / recipe.exchange.fragments
    in_flight = min(recipe.exchange.fragments, 1 + int(recipe.exchange.overlap / gap))
    largest = max(fragment.values for fragment in fragments)
    return -(-(ANCHOR_BYTES * counts.total + FLIGHT_BYTES * in_flight * largest) // num_ranks)


def rank_memory(
    recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], cell: CellPlan, on_cpu: bool
) -> Figure:
    """Peak memory of one rank where it computes; on a ``cpu`` site the exchange's state is in it."""
    ranks = cell.num_ranks
    fixed = state_bytes(counts, ranks) + gathered_bytes(counts, ranks, recipe.training.precision)
    snapshot = 4 * max(fragment.values for fragment in fragments) / ranks
    fixed += exchange_bytes(recipe, counts, fragments, ranks) if on_cpu else int(snapshot)
    activations = activation_bytes(recipe, ranks)
    low, value, high = (
        fixed + process + share * activations
        for process, share in zip(PROCESS_BYTES["cpu" if on_cpu else "gpu"], ACTIVATION_RANGE, strict=True)
    )
    return Figure(
        value=value,
        low=low,
        high=high,
        unit="B",
        formula=f"{STATE_BYTES} B × {counts.total} parameters / {ranks} ranks + gathered blocks + exchange "
        f"= {fixed / 1e9:.2f} GB; activations {activations / 1e9:.2f} GB × {ACTIVATION_RANGE[0]} to "
        f"{ACTIVATION_RANGE[2]}; the process itself",
    )


def rank_limit(site: SiteProfile, accelerator: Accelerator, cells_on_node: int, cell: CellPlan) -> Figure | None:
    """Memory that one rank may use: its accelerator's, or its part of the node's. None: not known."""
    if site.gpu.type == CPU:
        ranks = cells_on_node * cell.nodes[0].num_ranks
        limit = site.cpu.memory / ranks
        formula = "cpu.memory of the profile" + (f" / {ranks} ranks on the node" if ranks > 1 else "")
    elif accelerator.memory_bytes is not None:
        limit = float(accelerator.memory_bytes)
        formula = "gpu.memory of the profile" if site.gpu.memory else f"catalogue: {accelerator.name}"
    else:
        return None
    return Figure(value=limit, low=limit, high=limit, unit="B", formula=formula, assumed=False)


def node_memory(
    recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], cell: CellPlan, ranks_on_node: int
) -> Figure:
    """Processor memory that the exchange takes on one node of a GPU site."""
    exchange = exchange_bytes(recipe, counts, fragments, cell.num_ranks) * ranks_on_node
    low, value, high = (exchange + ranks_on_node * process for process in PROCESS_BYTES["gpu"])
    return Figure(
        value=value,
        low=low,
        high=high,
        unit="B",
        formula=f"{ranks_on_node} ranks × (exchange state {exchange / ranks_on_node / 1e9:.2f} GB + process)",
    )


def checkpoint_bytes(recipe: Recipe, counts: Counts) -> int:
    """One cell's checkpoint: weights and two moments, and the exchange's state."""
    return counts.total * (12 + (0 if recipe.exchange.mode == "none" else ANCHOR_BYTES))


def _compute_bytes(precision: str) -> int:
    return 2 if precision == "bfloat16" else 4
