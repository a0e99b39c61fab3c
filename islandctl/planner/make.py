"""From a recipe and sites to the Plan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from islandctl.config.load import Loaded
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError
from islandctl.planner import findings as judge
from islandctl.planner import memory, speed, wan
from islandctl.planner.budget import budget_finding
from islandctl.planner.catalogue import CPU, Accelerator, accelerator
from islandctl.planner.cells import make_cells
from islandctl.planner.cost import cost_finding, cost_per_hour
from islandctl.planner.fragments import FragmentSize, fragment_sizes, unused_pattern
from islandctl.planner.limits import not_yet
from islandctl.planner.parameters import Counts, parameters
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding, Plan, config_hash


def make_plan(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]]) -> Plan:
    """Resolve a run: who runs where, and a first honest figure for everything that may bind.

    The plan may be infeasible (``Plan.feasible``, findings of level ``fail``) or beyond what ``launch`` runs
    (``not_yet``); it is a plan all the same.

    Raises:
        ConfigError: recipe and sites contradict one another, or an accelerator is unknown.
    """
    cells = make_cells(recipe, sites)
    counts = parameters(recipe.value.model)
    try:
        fragments = fragment_sizes(recipe.value.model, recipe.value.exchange)
    except ValueError as error:
        raise ConfigError(
            f"{recipe.at('exchange', 'fragments')}: exchange.fragments: {error}",
            hint=f"set exchange.fragments to at most {recipe.value.model.layers}",
        ) from error
    unused = unused_pattern(recipe.value.model, recipe.value.exchange)
    if unused is not None:
        raise ConfigError(
            f"{recipe.at('exchange', 'exact')}: exchange.exact: no parameter of the model fits '{unused}'",
            hint="names look like blocks.0.attention.q.weight; * stands for anything",
        )
    known = {site.value.name: (site.value, accelerator(site)) for site in sites}
    cells_on = Counter(cell.site for cell in cells)
    links = {cell.name: wan.link_of(known[cell.site][0], recipe.value, cells_on[cell.site]) for cell in cells}
    estimates = tuple(
        _estimate(recipe.value, counts, fragments, cell, *known[cell.site], links, cells_on[cell.site])
        for cell in cells
    )
    cost = cost_per_hour(recipe.value, list(known.values()), estimates, cells)
    plan = Plan(
        recipe=recipe.value,
        sites=tuple(site.value for site in sites),
        cells=cells,
        config_hash=config_hash(recipe.value, tuple(cell.name for cell in cells)),
        sources={
            os.path.abspath(recipe.path): recipe.text_hash,
            **{os.path.abspath(site.path): site.text_hash for site in sites},
        },
        parameters_total=counts.total,
        parameters_active=counts.active,
        estimates=estimates,
        cost_per_hour=cost,
        feasible=True,
    )
    found = [*_findings(plan, counts, fragments, links, cells_on), *cost_finding(list(known.values()))]
    found += [finding] if (finding := budget_finding(plan)) else []
    found += not_yet(plan)
    feasible = all(finding.level != "fail" for finding in found)
    return plan.model_copy(update={"findings": judge.merged(found), "feasible": feasible})


def _estimate(
    recipe: Recipe,
    counts: Counts,
    fragments: tuple[FragmentSize, ...],
    cell: CellPlan,
    site: SiteProfile,
    known: Accelerator,
    links: dict[str, wan.Link],
    cells_on_site: int,
) -> CellEstimate:
    on_cpu = site.gpu.type == CPU
    cells_on_node = max(1, cells_on_site // site.num_nodes)
    ranks_on_node = cell.nodes[0].num_ranks * cells_on_node
    partners = wan.num_partners(recipe.exchange, len(links))
    step = speed.step_time(recipe, counts, site, known, cell)
    exchange = wan.round_time(fragments, cell, links, partners)
    hidden = wan.hidden_time(recipe, step)
    busy = wan.busy_time(fragments, links[cell.name], partners)
    codec = recipe.exchange.codec
    return CellEstimate(
        cell=cell.name,
        memory_per_rank=memory.rank_memory(recipe, counts, fragments, cell, on_cpu),
        memory_limit=memory.rank_limit(site, known, cells_on_node, cell),
        step=step,
        tokens_per_s=speed.tokens_per_s(recipe, step),
        bytes_up_per_window=wan.volume(fragments, min(1, partners), codec, "sent"),
        bytes_down_per_window=wan.volume(fragments, partners, codec, "fetched"),
        exchange=exchange,
        overlap=hidden,
        wait_per_window=wan.wait_per_window(recipe, exchange, hidden),
        link_share=wan.link_share(recipe, busy, step),
        node_memory=None if on_cpu else memory.node_memory(recipe, counts, fragments, cell, ranks_on_node),
        node_memory_limit=None if on_cpu else _whole_node(site),
    )


def _whole_node(site: SiteProfile) -> Figure:
    size = site.cpu.memory
    return Figure(value=size, low=size, high=size, unit="B", formula="cpu.memory of the profile", assumed=False)


def _findings(
    plan: Plan,
    counts: Counts,
    fragments: tuple[FragmentSize, ...],
    links: dict[str, wan.Link],
    cells_on: Counter[str],
) -> list[Finding]:
    recipe = plan.recipe
    partners = wan.num_partners(recipe.exchange, len(links))
    found: list[Finding | None] = []
    for estimate in plan.estimates:
        busy = wan.busy_time(fragments, links[estimate.cell], partners)
        found += [
            judge.memory_finding(estimate),
            judge.node_memory_finding(estimate),
            judge.exchange_finding(recipe, estimate, busy),
        ]
    found += [judge.storage_finding(recipe, counts, site, cells_on[site.name]) for site in plan.sites]
    found += [judge.deadline_finding(recipe, fragments, links), judge.pace_finding(plan.estimates)]
    return [finding for finding in found if finding is not None]
