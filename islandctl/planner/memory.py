"""What a rank and a node must hold."""

from __future__ import annotations

import math

from islandctl.config.exchange import Exchange
from islandctl.config.model import Model
from islandctl.config.recipe import ModelRecipe, Recipe
from islandctl.config.site import Measured, SiteProfile
from islandctl.planner import optimizer_state
from islandctl.planner.activations import LOGIT_BYTES, block_bytes, compute_bytes
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.layout import Layout
from islandctl.planner.parameters import Counts, padded, parameters, tensors
from islandctl.planner.plan import CellPlan, Figure

WEIGHT_BYTES = 4
"""A parameter, fp32."""
GRADIENT_BYTES = 4
"""Its gradient, fp32."""
ANCHOR_BYTES = {"average": 8, "nesterov": 12, "delayed": 16}
"""A parameter in the exchange, on the processor: fp32 anchor, residual, and what the outer optimizer remembers."""
REFERENCE_BYTES = 8
"""A parameter in a butterfly, for each of the k partners: fp32 reference and residual."""
FLIGHT_BYTES = 48
"""A parameter of a fragment in flight: fp32 snapshot and vector, two decoded packets, their mean and the outer step
on it, new anchor and momentum, coded packets: 36, and what the allocator keeps of them. Measured with 28 M parameters
in two fragments: 50."""
PROCESS_BYTES = {"cpu": (0.33e9, 0.39e9, 0.55e9), "gpu": (1.0e9, 2.0e9, 4.0e9)}
"""What a worker holds beside that: interpreter, torch, the kernels' workspace (0.37 GB measured with torch 2.13's CPU
build, 0.25 of it after ``import torch``); on a GPU context, NCCL, workspace (assumption)."""
ACTIVATION_RANGE = (0.85, 1.0, 1.3)
"""Times the counted activations (assumption): freed early, fused; as counted; uneven experts, temporaries."""
FRAGMENTATION = (1.0, 1.03, 1.08)
"""Times what the allocator is asked for (assumption): pieces too small to be used again."""


class RankMemory(Model):
    """The parts of one rank's peak, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """What is whole for a moment: two blocks' weights, one's gradients, embedding and head."""
    activations: int
    exchange: int
    """The exchange's state where it lies beside the model, else the snapshot's largest parameter."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.exchange


def gathered_bytes(model: ModelRecipe, precision: str, layout: Layout) -> int:
    """What FSDP2 holds unsharded on one rank, in c bytes a value: embedding and head for the whole step and the
    head's gradient (c·3·V·d); two blocks (one computes, one is fetched), one block's gradient, and its fp32 copy that
    is being reduced (c·3 + 4). Tensor parallelism divides all of it, expert parallelism the experts.

    A rank alone gathers nothing; in bfloat16 autocast keeps a second copy of every weight.
    """
    counts, size = parameters(model), compute_bytes(precision)
    ends = counts.embedding + 2 * counts.head
    if layout.ranks == 1:
        return size * counts.total if size < WEIGHT_BYTES else 0
    if layout.fsdp == 1:
        return 0
    block = counts.layer - counts.experts // model.layers + counts.experts // model.layers // layout.expert
    return (size * ends + (3 * size + 4) * block) // layout.tensor


def activation_bytes(recipe: Recipe, layout: Layout) -> int:
    """What one rank keeps for the backward pass: its tokens times what each leaves behind.

    Tensor parallelism (with sequence parallelism) divides it. In a pipeline of S stages every sequence is a
    microbatch, and the first stage holds up to S of them, of its own 1/S of the blocks.
    """
    model, training = recipe.decoder, recipe.training
    sequences = -(-training.batch // layout.fsdp)
    held = min(layout.pipeline, sequences) if layout.pipeline > 1 else sequences
    at_loss = 1 if layout.pipeline > 1 else sequences
    blocks = -(-model.layers // layout.pipeline)
    block = block_bytes(model, training.precision, training.recompute)
    again = 0 if training.recompute == "none" else block_bytes(model, training.precision, "none")
    per_sequence = held * (blocks * block) + at_loss * (again + LOGIT_BYTES * model.vocabulary)
    return training.sequence * per_sequence // layout.tensor


def state_bytes(exchange: Exchange) -> int:
    """What the exchange keeps of a parameter, in memory and in a checkpoint; ``exchange.cells`` is filled in."""
    if exchange.mode == "none":
        return 0
    if exchange.mode == "butterfly":
        return REFERENCE_BYTES * ((exchange.cells or 2).bit_length() - 1)
    return ANCHOR_BYTES[exchange.outer.kind]


def exchange_bytes(recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], num_ranks: int) -> int:
    """Processor memory of one rank for the exchange: the state of its chunks, and the fragments in flight."""
    if recipe.exchange.mode == "none":
        return 0
    gap = recipe.exchange.window / recipe.exchange.fragments
    in_flight = min(recipe.exchange.fragments, 1 + int(recipe.exchange.overlap / gap))
    largest = max(fragment.values for fragment in fragments)
    return -(-(state_bytes(recipe.exchange) * counts.total + FLIGHT_BYTES * in_flight * largest) // num_ranks)


def rank_parts(
    recipe: Recipe, counts: Counts, fragments: tuple[FragmentSize, ...], layout: Layout, on_cpu: bool
) -> RankMemory:
    """The parts of one rank's peak where it computes; on a ``cpu`` site the exchange's state is among them."""
    ranks, others = layout.ranks, layout.tensor * layout.pipeline
    part = -(-padded(recipe.decoder, layout.fsdp) // (layout.fsdp * others))
    if on_cpu:
        exchange = exchange_bytes(recipe, counts, fragments, ranks)
    elif recipe.exchange.mode == "none":
        exchange = 0
    else:  # a snapshot brings together one parameter after another
        exchange = 4 * max(math.prod(tensor.shape) for tensor in tensors(recipe.decoder)) if ranks > 1 else 0
        exchange += 4 * max(fragment.values for fragment in fragments) // ranks
    return RankMemory(
        weights=WEIGHT_BYTES * part,
        gradients=GRADIENT_BYTES * part,
        optimizer=optimizer_state.rank_bytes(recipe.decoder, recipe.training.inner, layout.fsdp) // others,
        gathered=gathered_bytes(recipe.decoder, recipe.training.precision, layout),
        activations=activation_bytes(recipe, layout),
        exchange=exchange,
    )


def rank_memory(
    parts: RankMemory, on_cpu: bool, measured: Measured | None = None, text: Figure | None = None
) -> Figure:
    """Peak memory of one rank, or what a run has shown.

    Args:
        text: that the rank holds in the same memory; only where it computes on the processor.
    """
    if measured is not None and measured.memory is not None:
        seen = measured.memory
        return Figure(
            value=seen, low=seen, high=seen, unit="B", formula=f"measured.memory of a rank: {measured.source}",
            assumed=False,
        )  # fmt: skip
    fixed = parts.total - parts.activations
    low, value, high = (
        (fixed + share * parts.activations) * spread + process + held
        for process, share, spread, held in zip(
            PROCESS_BYTES["cpu" if on_cpu else "gpu"],
            ACTIVATION_RANGE,
            FRAGMENTATION,
            (text.low, text.value, text.high) if text is not None and on_cpu else (0.0, 0.0, 0.0),
            strict=True,
        )
    )
    words = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts if size)
    return Figure(
        value=value,
        low=low,
        high=high,
        unit="B",
        formula=f"GB a rank: {words}; the process itself; activations × {ACTIVATION_RANGE[0]} to "
        f"{ACTIVATION_RANGE[2]}, fragmentation up to {FRAGMENTATION[2]}",
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
    recipe: Recipe,
    counts: Counts,
    fragments: tuple[FragmentSize, ...],
    cell: CellPlan,
    ranks_on_node: int,
    text: Figure | None = None,
) -> Figure:
    """Processor memory that workers, exchange and text take on one node of a GPU site."""
    exchange = exchange_bytes(recipe, counts, fragments, cell.num_ranks) * ranks_on_node
    held = (0.0, 0.0, 0.0) if text is None else (text.low, text.value, text.high)
    low, value, high = (
        exchange + ranks_on_node * (process + own) for process, own in zip(PROCESS_BYTES["gpu"], held, strict=True)
    )
    return Figure(
        value=value,
        low=low,
        high=high,
        unit="B",
        formula=f"{ranks_on_node} ranks × (exchange state {exchange / ranks_on_node / 1e9:.2f} GB + process + text "
        f"{held[1] / 1e9:.3g} GB)",
    )
