"""From a recipe and sites to the Plan."""

from __future__ import annotations

import os
from collections.abc import Sequence

from islandctl.config.load import Loaded
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError
from islandctl.planner import findings as judge
from islandctl.planner import utilisation, wan
from islandctl.planner.advice import changes
from islandctl.planner.catalogue import accelerator
from islandctl.planner.cells import make_cells
from islandctl.planner.change import Case
from islandctl.planner.constraints import constraints
from islandctl.planner.cost import cost_finding
from islandctl.planner.estimate import Setting, estimates, resolve
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.limits import not_yet
from islandctl.planner.parameters import parameters
from islandctl.planner.plan import Finding, MethodRow, Plan, config_hash
from islandctl.planner.proposals import layout_finding
from islandctl.planner.totals import totals

SHOWN = (0.8, 0.95, 0.99)
"""Shares of the time whose bandwidth the plan tells for each method."""


def make_plan(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]]) -> Plan:
    """Resolve a run: who runs where, and a first honest figure for everything that may bind.

    The plan may be infeasible (``Plan.feasible``, findings of level ``fail``) or beyond what ``launch`` runs
    (``not_yet``); it is a plan all the same. What binds comes with changes that lift it.

    Raises:
        ConfigError: recipe and sites contradict one another, or an accelerator is unknown.
    """
    case = Case(recipe, sites)
    plan, setting = _plan(case)
    return plan.model_copy(
        update={
            "methods": method_rows(setting, plan),
            "changes": changes(case, plan, lambda new: _plan(new)[0]),
        }
    )


def bare_plan(case: Case) -> Plan:
    """The plan without the table of methods and without advice: for planning many times."""
    return _plan(case)[0]


def _plan(case: Case) -> tuple[Plan, Setting]:
    recipe, sites = case.recipe, case.sites
    cells = make_cells(recipe, sites)
    counts = parameters(recipe.value.model)
    try:
        fragments = fragment_sizes(recipe.value.model, recipe.value.exchange)
    except ValueError as error:
        raise ConfigError(
            f"{recipe.at('exchange', 'fragments')}: exchange.fragments: {error}",
            hint=f"set exchange.fragments to at most {recipe.value.model.layers}",
        ) from error
    known = {site.value.name: (site.value, accelerator(site)) for site in sites}
    setting = resolve(recipe.value, counts, fragments, cells, known)
    estimated = estimates(setting)
    total = totals(setting, estimated)
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
        estimates=estimated,
        totals=total,
        constraints=constraints(setting, estimated, total),
        feasible=True,
    )
    found = [*_findings(plan, setting), *cost_finding(list(known.values())), *not_yet(plan)]
    feasible = all(finding.level != "fail" for finding in found)
    return plan.model_copy(update={"findings": judge.merged(found), "feasible": feasible}), setting


def _findings(plan: Plan, setting: Setting) -> list[Finding]:
    recipe = plan.recipe
    found: list[Finding | None] = []
    for cell, estimate in zip(plan.cells, plan.estimates, strict=True):
        busy = wan.busy_time(setting.fragments, setting.links[estimate.cell], setting.partners)
        fits = judge.memory_finding(estimate)
        found += [fits, judge.node_memory_finding(estimate), judge.exchange_finding(recipe, estimate, busy)]
        if fits.level == "fail" and estimate.memory_limit is not None:
            found.append(layout_finding(setting, cell, estimate.memory_limit.value))
    checkpoint = plan.estimates[0].checkpoint_bytes.value
    found += [judge.storage_finding(recipe, checkpoint, site, setting.cells_on[site.name]) for site in plan.sites]
    found += [
        judge.deadline_finding(recipe, setting.fragments, setting.links),
        judge.pace_finding(plan.estimates),
        judge.checkpoint_finding(recipe, plan.totals),
        judge.tunnel_finding(recipe, plan.sites),
    ]
    return [finding for finding in found if finding is not None]


def method_rows(setting: Setting, plan: Plan, shown: Sequence[float] = SHOWN) -> tuple[MethodRow, ...]:
    """The published ways of keeping replicas together, for this model at the slowest cell's step and link."""
    steps = [estimate.step.value for estimate in plan.estimates if estimate.step is not None]
    if not steps or not setting.partners:
        return ()
    rate = 8 * min(
        min(link.up_bytes_per_s, link.down_bytes_per_s / setting.partners) for link in setting.links.values()
    )
    layers, size, step = plan.recipe.model.layers, float(plan.parameters_total), max(steps)
    rows = []
    for method in utilisation.methods(layers, plan.recipe.exchange.window):
        values = {"layers": layers, "parameters": size, "step_s": step}
        rows.append(
            MethodRow(
                name=method.name,
                computing=utilisation.utilisation(method, **values, bits_per_s=rate),  # type: ignore[arg-type]
                bandwidth={
                    f"{wanted:g}": utilisation.bandwidth_for(wanted, method, **values)  # type: ignore[arg-type]
                    for wanted in shown
                },
            )
        )
    return tuple(rows)
