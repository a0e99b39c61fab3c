"""From a recipe and sites to the Plan."""

from __future__ import annotations

import os
from collections.abc import Sequence

from islandctl.config.load import Loaded
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError, UsageError
from islandctl.planner import findings as judge
from islandctl.planner import speed, utilisation, wan
from islandctl.planner.advice import MOST_CELLS, changes
from islandctl.planner.balance import balance_finding, balanced
from islandctl.planner.budget import budget_finding
from islandctl.planner.catalogue import accelerator
from islandctl.planner.cells import make_cells
from islandctl.planner.change import Case
from islandctl.planner.compare import Compared, compare
from islandctl.planner.constraints import constraints
from islandctl.planner.cost import cost_finding
from islandctl.planner.estimate import Setting, estimates, resolve, shares
from islandctl.planner.feed import feed_finding
from islandctl.planner.fragments import FragmentSize, fragment_sizes, unused_pattern
from islandctl.planner.from_run import Shown, adopted
from islandctl.planner.jobs import job_findings
from islandctl.planner.limits import not_yet
from islandctl.planner.pace import pace_finding, with_own_steps
from islandctl.planner.parameters import parameters
from islandctl.planner.plan import (
    CellEstimate,
    CellPlan,
    CellShare,
    Finding,
    MethodRow,
    Plan,
    RelayPlace,
    config_hash,
)
from islandctl.planner.proposals import layout_finding
from islandctl.planner.relay_place import relay_finding, relay_places
from islandctl.planner.script import plan_of_script
from islandctl.planner.simulated import Simulated, simulated
from islandctl.planner.storage import checkpoint_bytes
from islandctl.planner.sweep import Axis, Swept, sweep
from islandctl.planner.totals import totals
from islandctl.planner.warmup import warmup_finding

SHOWN = (0.8, 0.95, 0.99)
"""Shares of the time whose bandwidth the plan tells for each method."""
OWN = "this recipe"


def make_plan(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]], shown: Shown | None = None) -> Plan:
    """Resolve a run: who runs where, and a first honest figure for everything that may bind.

    The plan may be infeasible (``Plan.feasible``, findings of level ``fail``) or beyond what ``launch`` runs
    (``not_yet``); it is a plan all the same. What binds comes with changes that lift it.

    Args:
        shown: a run whose figures take the place of assumed ones.

    Raises:
        ConfigError: recipe and sites contradict one another, or an accelerator is unknown.
    """
    if recipe.value.worker.command is not None:
        return plan_of_script(recipe, sites, make_cells(recipe, sites))
    case = Case(recipe, sites, shown)
    plan, setting = _plan(case)
    return plan.model_copy(
        update={
            "methods": method_rows(setting, plan),
            "changes": changes(case, plan, lambda new: _plan(new)[0]),
        }
    )


def sweep_plans(case: Case, axes: Sequence[Axis]) -> Swept:
    """Plan at every point of one or two axes.

    Raises:
        UsageError: see ``sweep``; or a script trains, of which nothing is known that could be compared.
    """
    _refuse_script(case)
    return sweep(case, axes, _plan, method_shares)


def compare_plans(sets: Sequence[Case], seasonal_share: float) -> Compared:
    """Plan sets of sites, rented and owned.

    Raises:
        ConfigError: see ``make_plan``.
        UsageError: see ``compare``; or a script trains.
    """
    for case in sets:
        _refuse_script(case)
    return compare(sets, lambda case: _plan(case)[0], seasonal_share)


def simulate_plan(case: Case, seed: int) -> tuple[Plan, Simulated]:
    """Plan, and play the schedule with what goes wrong.

    Raises:
        ConfigError: see ``make_plan``.
        UsageError: a step time is not known, or a script trains.
    """
    _refuse_script(case)
    plan, setting = _plan(case)
    return plan, simulated(setting, plan, seed)


def _refuse_script(case: Case) -> None:
    if case.recipe.value.worker.command is not None:
        raise UsageError(f"{case.recipe.at('worker', 'command')}: worker.command: a script's figures are not known")


def _plan(case: Case) -> tuple[Plan, Setting]:
    recipe, sites = case.recipe, case.sites
    if case.shown is not None:
        sites = tuple(adopted(case.shown, recipe.value, sites))
    cells = make_cells(recipe, sites)
    counts, fragments = parameters(recipe.value.decoder), _fragments(recipe)
    unused = unused_pattern(recipe.value.decoder, recipe.value.exchange)
    if unused is not None:
        raise ConfigError(
            f"{recipe.at('exchange', 'exact')}: exchange.exact: no parameter of the model fits '{unused}'",
            hint="names look like blocks.0.attention.q.weight; * stands for anything",
        )
    known = {site.value.name: (site.value, accelerator(site)) for site in sites}
    cells = with_own_steps(recipe, cells, lambda cell: speed.step_time(recipe.value, counts, *known[cell.site], cell))
    setting = resolve(recipe.value, counts, fragments, cells, known)
    estimated = estimates(setting)
    total = totals(setting, estimated)
    plan = Plan(
        recipe=recipe.value,
        sites=tuple(site.value for site in sites),
        cells=cells,
        config_hash=config_hash(recipe.value, cells),
        sources={
            os.path.abspath(recipe.path): recipe.text_hash,
            **{os.path.abspath(site.path): site.text_hash for site in sites},
        },
        parameters_total=counts.total,
        parameters_active=counts.active,
        estimates=estimated,
        totals=total,
        constraints=constraints(setting, estimated, total),
        feasible=True,
    )
    plan = plan.model_copy(update={"balance": _balance(setting, estimated), "relay_places": _places(setting)})
    found = [*_findings(plan, setting), *cost_finding(list(known.values()))]
    found += [finding] if (finding := budget_finding(plan)) else []
    found += [*not_yet(plan), *job_findings(plan)]
    feasible = all(finding.level != "fail" for finding in found)
    return plan.model_copy(update={"findings": judge.merged(found), "feasible": feasible}), setting


def saved_by(recipe: Loaded[Recipe], num_ranks: int) -> int | None:
    """Bytes of a checkpoint of a cell of ``num_ranks``, which no other site decides. None: a script trains.

    Raises:
        ConfigError: the model has fewer fragments than the recipe asks for.
    """
    if recipe.value.worker.command is not None:
        return None
    return checkpoint_bytes(recipe.value, parameters(recipe.value.decoder), _fragments(recipe), num_ranks)


def _fragments(recipe: Loaded[Recipe]) -> tuple[FragmentSize, ...]:
    try:
        return fragment_sizes(recipe.value.decoder, recipe.value.exchange)
    except ValueError as error:
        raise ConfigError(
            f"{recipe.at('exchange', 'fragments')}: exchange.fragments: {error}",
            hint=f"set exchange.fragments to at most {recipe.value.decoder.layers}",
        ) from error


def _findings(plan: Plan, setting: Setting) -> list[Finding]:
    recipe = plan.recipe
    found: list[Finding | None] = []
    for cell, estimate in zip(plan.cells, plan.estimates, strict=True):
        busy = wan.busy_time(setting.fragments, setting.links[estimate.cell], setting.partners)
        fits = judge.memory_finding(estimate)
        site, link = setting.sites[cell.site], setting.links[cell.name]
        found += [fits, judge.node_memory_finding(estimate)]
        found.append(judge.exchange_finding(recipe, estimate, busy, link, site))
        found.append(judge.network_finding(site, setting.accelerators[cell.site], cell, estimate))
        found.append(feed_finding(estimate, cell.nodes[0].num_ranks * _cells_on_node(setting, cell)))
        if fits.level == "fail" and estimate.memory_limit is not None:
            found.append(layout_finding(setting, cell, estimate.memory_limit.value))
    checkpoint = plan.estimates[0].checkpoint_bytes.value
    found += [judge.storage_finding(recipe, checkpoint, site, setting.cells_on[site.name]) for site in plan.sites]
    found += [
        judge.deadline_finding(recipe, setting.fragments, setting.links),
        pace_finding(recipe.exchange, plan.estimates),
        balance_finding(plan.balance),
        relay_finding(plan.relay_places),
        judge.checkpoint_finding(recipe, plan.totals),
        judge.tunnel_finding(recipe, plan.sites, setting.links),
        warmup_finding(recipe, setting.fragments, setting.links, plan.estimates),
    ]
    return [finding for finding in found if finding is not None]


def _cells_on_node(setting: Setting, cell: CellPlan) -> int:
    return max(1, setting.cells_on[cell.site] // setting.sites[cell.site].num_nodes)


def _balance(setting: Setting, estimated: Sequence[CellEstimate]) -> tuple[CellShare, ...]:
    """Steps a window with which all cells end together; none where a step is unknown."""
    steps_s = [one.step.value for one in estimated if one.step is not None]
    exchange = setting.recipe.exchange
    if len(steps_s) < max(2, len(estimated)) or len(steps_s) > MOST_CELLS or exchange.pace == "measured":
        return ()
    return balanced(setting.cells, steps_s, exchange)


def _places(setting: Setting) -> tuple[RelayPlace, ...]:
    """Places for the relay; none where it is emulated, or nothing passes it."""
    if not setting.partners or setting.recipe.relay.emulate is not None or len(setting.cells) > MOST_CELLS:
        return ()
    size = max(fragment.encoded_bytes for fragment in setting.fragments)
    return relay_places(setting.sites, setting.cells, setting.links, size, setting.partners)


def method_rows(setting: Setting, plan: Plan) -> tuple[MethodRow, ...]:
    """The published ways of keeping replicas together, for this model at the slowest cell's step and link."""
    computing = method_shares(setting, plan)
    if not computing:
        return ()
    model = _as_published(plan)
    return _own_row(setting, plan) + tuple(
        MethodRow(
            name=method.name,
            computing=computing[method.name],
            bandwidth={f"{wanted:g}": utilisation.bandwidth_for(wanted, method, model) for wanted in SHOWN},
        )
        for method in utilisation.methods(model.layers, plan.recipe.exchange.window)
    )


def _own_row(setting: Setting, plan: Plan) -> tuple[MethodRow, ...]:
    """The recipe as it is: what bandwidth its own schedule takes, round trips included. Not for many cells, whose
    schedule takes long to play, and no row where waiting has another cause than the links."""
    if len(plan.cells) > MOST_CELLS or plan.totals.computing is None:
        return ()

    def computing(bits_per_s: float) -> float:
        return min(shares(setting, plan.estimates, bytes_per_s=bits_per_s / 8))

    needed = {f"{wanted:g}": utilisation.least_rate(computing, wanted) for wanted in SHOWN}
    known = {wanted: rate for wanted, rate in needed.items() if rate is not None}
    if len(known) < len(SHOWN):
        return ()
    return (MethodRow(name=OWN, computing=plan.totals.computing.value, bandwidth=known),)


def method_shares(setting: Setting, plan: Plan) -> dict[str, float]:
    """Each published method's compute utilisation at the slowest link. Empty where a step time is unknown."""
    if not setting.partners or any(estimate.step is None for estimate in plan.estimates):
        return {}
    rate = 8 * min(
        min(link.up_bytes_per_s, link.down_bytes_per_s / setting.partners) for link in setting.links.values()
    )
    model = _as_published(plan)
    return {
        method.name: utilisation.utilisation(method, model, bits_per_s=rate)
        for method in utilisation.methods(model.layers, plan.recipe.exchange.window)
    }


def _as_published(plan: Plan) -> utilisation.Job:
    """The model as that simulation sees it: equal layers, and the slowest cell's step."""
    step_s = max(estimate.run_step.value for estimate in plan.estimates if estimate.run_step is not None)
    assert plan.parameters_total is not None
    return utilisation.Job(layers=plan.recipe.decoder.layers, parameters=plan.parameters_total, step_s=step_s)
