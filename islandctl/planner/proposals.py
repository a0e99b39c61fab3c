"""Other ways to share a model over the ranks of a cell, where FSDP alone does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from islandctl.config.units import memory_text
from islandctl.planner import memory
from islandctl.planner.catalogue import CPU
from islandctl.planner.estimate import Setting
from islandctl.planner.layout import Layout
from islandctl.planner.plan import CellPlan, Finding

MOST = 3
"""Proposals that are shown."""


def layouts(setting: Setting, cell: CellPlan) -> Iterator[Layout]:
    """Layouts with all ranks of the cell, those that talk least first: tensor parallelism stays on a node, stages
    hold whole blocks, and every sharing rank has a sequence."""
    ranks, model, batch = cell.num_ranks, setting.recipe.decoder, setting.recipe.training.batch
    for expert in _powers(ranks if model.experts else 1):
        for tensor in _powers(cell.nodes[0].num_ranks):
            for pipeline in _powers(min(ranks, model.layers)):
                share, rest = divmod(ranks, tensor * pipeline)
                possible = not rest and batch % share == 0 and model.heads % tensor == 0
                if possible and share % expert == 0 and (model.experts or 1) % expert == 0:
                    yield Layout(fsdp=share, tensor=tensor, pipeline=pipeline, expert=expert)


def layout_finding(setting: Setting, cell: CellPlan, limit: float) -> Finding:
    """What would fit in ``limit`` bytes a rank."""
    on_cpu = setting.sites[cell.site].gpu.type == CPU
    fitting = []
    for layout in layouts(setting, cell):
        parts = memory.rank_parts(setting.recipe, setting.counts, setting.fragments, layout, on_cpu)
        need = memory.rank_memory(parts, on_cpu).value
        if need <= limit:
            fitting.append(f"{layout} ({memory_text(need)})")
        if len(fitting) == MOST:
            break
    if not fitting:
        text = f"no layout of FSDP, tensor, expert and pipeline parallelism over {cell.num_ranks} ranks fits"
        return Finding(
            level="warn", place=cell.name, text=text, hint="more accelerators, or a smaller model or batch"
        )
    return Finding(
        level="warn",
        place=cell.name,
        text=f"layouts that would fit: {', '.join(fitting)}; islandctl's own worker shares by FSDP alone",
    )


def _powers(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2
