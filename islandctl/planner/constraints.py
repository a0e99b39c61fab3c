"""What can be used up, and how much of it a plan uses: the weakest link is the one that is used the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from islandctl.planner import speed, wan
from islandctl.planner.catalogue import CPU
from islandctl.planner.estimate import Setting
from islandctl.planner.plan import CellEstimate, CellPlan, Constraint, Totals

Found = Iterable[Constraint | None]

TIGHT = 0.9
"""Use from which a constraint deserves to be called tight."""


def constraints(setting: Setting, estimates: Sequence[CellEstimate], totals: Totals) -> tuple[Constraint, ...]:
    """Every constraint once, at the place where it is tightest; the scarcest first.

    Hard ones that are used up come before all others: then the plan cannot work.
    """
    tightest: dict[str, Constraint] = {}
    for found in _all(setting, estimates, totals):
        if found is not None and found.has > 0:
            known = tightest.setdefault(found.name, found)
            if found.use > known.use:
                tightest[found.name] = found
    return tuple(sorted(tightest.values(), key=lambda one: (not (one.hard and one.use > 1), -one.use)))


def _all(setting: Setting, estimates: Sequence[CellEstimate], totals: Totals) -> Found:
    per_cell: tuple[Callable[[Setting, CellPlan, CellEstimate], Constraint | None], ...] = (
        _accelerator_memory, _node_memory, _matrix, _network, _window, _overlap, _deadline, _cores,
    )  # fmt: skip
    for cell, estimate in zip(setting.cells, estimates, strict=True):
        for formula in per_cell:
            yield formula(setting, cell, estimate)
    for name in setting.sites:
        yield _free_space(setting, name, estimates[0].checkpoint_bytes.value)
    yield _pace(estimates)
    yield _failures(totals)


def _accelerator_memory(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    limit, need = estimate.memory_limit, estimate.memory_per_rank
    if limit is None:
        return None
    return Constraint(
        name="memory of a rank", place=cell.name, need=need.value, has=limit.value, unit="B", formula=need.formula
    )


def _node_memory(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    need, limit = estimate.node_memory, estimate.node_memory_limit
    if need is None or limit is None:
        return None
    return Constraint(
        name="memory of a node", place=cell.name, need=need.value, has=limit.value, unit="B", formula=need.formula
    )


def _matrix(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    """Arithmetic: what the accelerators would need without any traffic, of what a step takes."""
    known, step = setting.accelerators[cell.site], estimate.step
    if step is None or known.matrix_flops is None:
        return None
    seconds = speed.arithmetic_s(setting.recipe, setting.counts, known, cell)
    return Constraint(
        name="compute", place=cell.name, need=min(seconds, step.value), has=step.value, unit="s", hard=False,
        formula="products at the middle of their efficiency and memory traffic, of the step",
    )  # fmt: skip


def _network(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    known, step = setting.accelerators[cell.site], estimate.step
    if step is None or cell.num_ranks == 1:
        return None
    seconds, words = speed.traffic_s(setting.recipe, setting.sites[cell.site], known, cell)
    if not seconds:
        return None
    return Constraint(
        name="network in the site", place=cell.name, need=min(seconds, step.value), has=step.value, unit="s",
        formula=f"{words}, of the step", hard=False,
    )  # fmt: skip


def _window(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    """All of a window's bytes, and every single round, must pass within a window; else training always waits."""
    step = estimate.run_step
    if step is None or not setting.partners:
        return None
    busy = wan.busy_time(setting.fragments, setting.links[cell.name], setting.partners)
    window = setting.recipe.exchange.window
    return Constraint(
        name="WAN in a window", place=cell.name, need=max(busy, estimate.exchange.value), has=window * step.high,
        unit="s", formula=f"busier direction, or the longest round, of {window} steps at their slowest",
    )  # fmt: skip


def _overlap(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    hidden = estimate.overlap
    if hidden is None or not setting.partners:
        return None
    overlap = setting.recipe.exchange.overlap
    return Constraint(
        name="WAN in the overlap", place=cell.name, need=estimate.exchange.value,
        has=hidden.value if overlap else estimate.run_step.value if estimate.run_step else 0.0, unit="s", hard=False,
        formula=f"a round within {overlap} steps" if overlap else "overlap 0 hides nothing: a round against a step",
    )  # fmt: skip


def _deadline(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    if not setting.partners:
        return None
    size = max(fragment.encoded_bytes for fragment in setting.fragments)
    return Constraint(
        name="round's deadline", place=cell.name, need=size / setting.links[cell.name].up_bytes_per_s,
        has=setting.recipe.exchange.late.deadline, unit="s",
        formula="the largest fragment's way up within exchange.late.deadline",
    )  # fmt: skip


def _cores(setting: Setting, cell: CellPlan, estimate: CellEstimate) -> Constraint | None:
    """One core a rank feeds it; coding fragments takes more of them, for a part of the time."""
    site, step = setting.sites[cell.site], estimate.run_step
    if site.gpu.type == CPU or step is None:
        return None
    on_node = max(1, setting.cells_on[cell.site] // site.num_nodes) * cell.nodes[0].num_ranks
    coded = setting.counts.total * (1 + setting.partners) if setting.partners else 0
    coding = coded / cell.num_ranks / wan.ENCODE_VALUES_PER_S / (setting.recipe.exchange.window * step.value)
    return Constraint(
        name="cores of a node", place=cell.name, need=on_node * (1 + coding), has=site.cpu.cores, unit="cores",
        formula=f"{on_node} ranks × (1 + {coding:.2g} that code fragments)", hard=False,
    )  # fmt: skip


def _free_space(setting: Setting, name: str, checkpoint: float) -> Constraint | None:
    free = setting.sites[name].storage.free
    if free is None:
        return None
    keep, cells = max(2, setting.recipe.checkpoint.keep), setting.cells_on[name]
    return Constraint(
        name="space for checkpoints", place=f"site {name}", need=checkpoint * (keep + 1) * cells, has=free, unit="B",
        formula=f"{keep} kept and one being written, of {cells} cells",
    )  # fmt: skip


def _pace(estimates: Sequence[CellEstimate]) -> Constraint | None:
    """The fastest cell waits for the slowest: its window against theirs."""
    known = [(one.run_step.value, one.cell) for one in estimates if one.run_step is not None]
    if len(known) < 2 or len(known) < len(estimates):
        return None
    (fast, _), (slow, name) = min(known), max(known)
    return Constraint(
        name="pace of the slowest", place=name, need=1 - fast / slow, has=1.0, unit="", hard=False,
        formula="share of the fastest cell's time that goes to waiting for this one",
    )  # fmt: skip


def _failures(totals: Totals) -> Constraint | None:
    if totals.lost is None:
        return None
    return Constraint(
        name="failures and checkpoints", place="all sites", need=totals.lost.value, has=1.0, unit="",
        formula=totals.lost.formula, hard=False,
    )  # fmt: skip
