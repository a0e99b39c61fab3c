"""The plan of a script of the user's own: who runs where, and what the links carry. The rest it cannot know."""

from __future__ import annotations

import os
from collections.abc import Sequence

from blake3 import blake3

from islandctl.config.beside import unpacked
from islandctl.config.codec import FACTS, body_bytes
from islandctl.config.load import Loaded
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.config.units import bytes_text, seconds_text
from islandctl.planner.budget import budget_finding
from islandctl.planner.catalogue import accelerator
from islandctl.planner.cost import cost_finding, cost_per_hour
from islandctl.planner.findings import merged
from islandctl.planner.limits import not_yet
from islandctl.planner.pace import with_own_steps
from islandctl.planner.plan import CellPlan, Figure, Finding, Plan, Totals, config_hash
from islandctl.planner.totals import trained_steps


def plan_of_script(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]], cells: tuple[CellPlan, ...]) -> Plan:
    """Everything that launch needs, and an honest finding for what nobody has told."""
    value = recipe.value
    cells = with_own_steps(recipe, cells, lambda cell: _told_step([site.value for site in sites], cell))
    known = [(site.value, accelerator(site)) for site in sites]
    folder = os.path.dirname(os.path.abspath(recipe.path))
    plan = Plan(
        recipe=value,
        sites=tuple(site.value for site in sites),
        cells=cells,
        config_hash=config_hash(value, cells, recipe.files),
        sources={
            os.path.abspath(recipe.path): recipe.text_hash,
            **{os.path.abspath(site.path): site.text_hash for site in sites},
            **{
                os.path.join(folder, name): blake3(unpacked(text)[0]).hexdigest()
                for name, text in recipe.files.items()
            },
        },
        files=recipe.files,
        parameters_total=value.worker.parameters,
        parameters_active=value.worker.parameters,
        estimates=(),
        totals=Totals(
            tokens=trained_steps(value, cells) * value.training.batch * value.training.sequence,
            cost_per_hour=cost_per_hour(known, (), (), (0.0, 0.0, 0.0)),
        ),
        feasible=True,
    )
    unknown = Finding(
        level="warn",
        place="worker.command",
        text="a script trains: what it needs of memory and time is not known to the plan",
    )
    found = [unknown, *_links(plan), *_own_steps(plan), *cost_finding(known), *not_yet(plan)]
    if (budget := budget_finding(plan)) is not None:
        found.append(budget)
    feasible = all(finding.level != "fail" for finding in found)
    return plan.model_copy(update={"findings": merged(found), "feasible": feasible})


def _told_step(sites: Sequence[SiteProfile], cell: CellPlan) -> Figure | None:
    measured = next(site.measured for site in sites if site.name == cell.site)
    if measured.step is None:
        return None
    step, words = measured.step, f"measured.step of {measured.source}"
    return Figure(value=step, low=step, high=step, unit="s", formula=words, assumed=False)


def _window_s(plan: Plan, cell: CellPlan) -> float | None:
    """Seconds of a window that waits for nothing."""
    step = _told_step(plan.sites, cell)
    return None if step is None else (cell.window or plan.recipe.exchange.window) * step.value


def _own_steps(plan: Plan) -> list[Finding]:
    """What ``pace: measured`` gives each cell."""
    found = []
    for cell in plan.cells:
        window_s = _window_s(plan, cell)
        if cell.window is not None and window_s is not None:
            text = f"{cell.window} steps of its own a window, {seconds_text(window_s)}"
            found.append(Finding(level="ok", place=cell.name, text=text))
    return found


def _links(plan: Plan) -> list[Finding]:
    """How long each site's link is busy in every window."""
    exchange, parameters = plan.recipe.exchange, plan.recipe.worker.parameters
    if exchange.mode == "none":
        return []
    if parameters is None:
        text = "without the number of parameters it is not known what the links carry"
        return [Finding(level="warn", place="exchange", text=text, hint="set worker.parameters")]
    found = []
    for site in plan.sites:
        here = [cell for cell in plan.cells if cell.site == site.name]
        num_here, window_s = len(here), _window_s(plan, here[0]) if here else None
        # What goes as bf16 whatever the codec is not counted apart: few values do.
        up = num_here * body_bytes(exchange.codec, exchange.block or FACTS[exchange.codec].block, parameters)
        down = up * (1 if exchange.mode == "butterfly" else len(plan.cells) - 1)
        emulate = plan.recipe.relay.emulate
        most = emulate.bandwidth * num_here if emulate else float("inf")
        busy_s = 8 * max(up / min(site.wan.up, most), down / min(site.wan.down, most))
        text = (
            f"every window of {exchange.window} steps sends about {bytes_text(up)} and fetches {bytes_text(down)}: "
            f"{seconds_text(busy_s)} of the link"
        )
        text += "; the step time is not known" if window_s is None else f", in {seconds_text(window_s)} of training"
        found.append(Finding(level="ok", place=f"site {site.name}", text=text))
    return found
