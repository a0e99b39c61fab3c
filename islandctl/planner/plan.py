"""The Plan: everything resolved, frozen and hashed; what ``launch`` executes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field

from islandctl.config.model import Model, Name
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.ledger.configuration import exchange_parts, paces
from islandctl.ledger.packet import canonical_json, digest

PLAN_VERSION = 2


class NodePlan(Model):
    """One node's part of a cell."""

    index: int
    """0: holds rank 0."""
    host: str
    """As written in the profile; empty for this machine."""
    num_ranks: int


class CellPlan(Model):
    """One replica of the model and where it runs."""

    index: int
    name: Name
    """The site's name, or ``<site>-<n>`` where a site has several cells."""
    site: Name
    nodes: tuple[NodePlan, ...]
    window: int | None = None
    """Its own steps in a window, with ``exchange.pace: measured``; None: the recipe's."""

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of the whole cell."""
        return sum(node.num_ranks for node in self.nodes)


class Figure(Model):
    """One planned number with its range and the formula it comes from."""

    value: float
    low: float
    high: float
    unit: str
    formula: str
    """In words, with the inputs used."""
    assumed: bool = True
    """False when it follows from the inputs alone, without an assumption about speed or overhead."""


def scaled(step: Figure | None, pace: float) -> Figure | None:
    """Seconds of one of the run's steps in a cell that takes ``pace`` of its own for it."""
    if step is None or pace == 1:
        return step
    low, value, high = step.low * pace, step.value * pace, step.high * pace
    return step.model_copy(update={"low": low, "value": value, "high": high})


class CellEstimate(Model):
    """What the plan expects of one cell."""

    cell: Name
    memory_per_rank: Figure
    memory_limit: Figure | None = None
    step: Figure | None = None
    """Seconds a step; None where the accelerator's rate is unknown."""
    window: Figure | None = None
    """Its own steps in a window, where cells take unequal numbers of them."""
    pace: float = 1.0
    """Its own steps for one of the run's."""
    tokens_per_s: Figure | None = None
    bytes_up_per_window: Figure
    bytes_down_per_window: Figure
    exchange: Figure
    """Seconds from a fragment's snapshot until its result is here."""
    overlap: Figure | None = None
    """Seconds that training hides of it."""
    wait_per_window: Figure | None = None
    """Seconds of a window in which training stands still for the exchange; None where the step is unknown."""
    link_share: Figure | None = None
    """Share of the time in which the busier direction of the link is occupied; None where the step is unknown."""
    node_memory: Figure | None = None
    """Processor memory of one node that workers and exchange take, on a site with accelerators."""
    node_memory_limit: Figure | None = None
    utilisation: Figure | None = None
    """Model FLOPs utilisation (MFU) while nothing waits; None where the data sheet's rate is unknown."""
    computing: Figure | None = None
    """Share of the time in which the cell trains; the rest it waits for links or other cells."""
    checkpoint_bytes: Figure
    """Of one checkpoint."""
    checkpoint_write: Figure
    """Seconds until it is on disk. A range of assumptions where the profile has no storage.write."""
    text: Figure | None = None
    """Bytes of text that each rank holds in the processor's memory; None: the text's size is unknown."""
    text_rate: Figure | None = None
    """Bytes of text a second that the cell takes out of memory; None where the step is unknown."""
    text_load: Figure | None = None
    """Seconds in which the text is read at a start; None: its size is unknown."""

    @property
    def run_step(self) -> Figure | None:
        """Seconds in which the cell gets on by one of the run's steps."""
        return scaled(self.step, self.pace)


class Totals(Model):
    """What the plan expects of the whole run. What is None hangs on a step time that is unknown."""

    tokens: float
    """To the recipe's end, over all cells."""
    tokens_per_s: Figure | None = None
    """Of all cells, waits and failures taken off."""
    duration: Figure | None = None
    """Seconds to the recipe's end, with waits, checkpoints and failures."""
    computing: Figure | None = None
    """Share of the time in which the cell that waits most trains."""
    failures_per_hour: Figure | None = None
    between_failures: Figure | None = None
    """Seconds."""
    lost: Figure | None = None
    """Share of the time that goes to checkpoints, work done again, and restarts."""
    best_checkpoint_every: Figure | None = None
    """Steps between checkpoints that lose least."""
    relay_bytes_per_s: Figure | None = None
    """Into the relay and out of it, together."""
    cost_per_hour: Figure | None = None
    cost_per_billion_tokens: Figure | None = None
    cost_to_end: Figure | None = None


class Constraint(Model):
    """Something that can be used up: what is needed of it against what there is."""

    name: str
    place: str
    need: float
    has: float
    unit: str
    formula: str
    hard: bool = True
    """The plan cannot work beyond 1; otherwise it is only slower."""

    @property
    def use(self) -> float:
        """Needed share of what there is."""
        return self.need / self.has


class MethodRow(Model):
    """What a way of keeping replicas together would make of this model, step time and slowest link."""

    name: str
    computing: float
    """Share of the time in which the accelerators compute."""
    bandwidth: dict[str, float]
    """Wanted share → bits per second that it takes."""


class Change(Model):
    """A change of one setting that lifts what binds, planned again to be sure."""

    setting: str
    """As ``--set`` takes it."""
    before: str
    after: str
    effect: str


class CellShare(Model):
    """What one of several unequal cells would take on, for all to end a window together."""

    cell: Name
    steps: int
    """Its own steps a window, as ``exchange.pace: measured`` has them."""


class RelayPlace(Model):
    """One place for the relay."""

    place: str
    """A site, or ``here`` for where it is now."""
    round_s: float
    """Of the largest fragment, for the cell that has the result last."""
    bounded: bool
    """Some round-trip times between sites are not known (``wan.to``): at most this long."""


class Finding(Model):
    """Something that binds or deserves a word."""

    level: Literal["ok", "warn", "fail"]
    place: str
    text: str
    hint: str = ""


class Plan(Model):
    """A run, resolved. ``plan_hash`` covers all of it."""

    version: Literal[2] = 2
    recipe: Recipe
    sites: tuple[SiteProfile, ...]
    cells: tuple[CellPlan, ...]
    config_hash: str
    sources: dict[str, str]
    """File path → blake3 of its text, for every profile and the recipe."""
    files: dict[str, str] = Field(default_factory=dict)
    """The script's files as they were, by their path beside the recipe."""
    parameters_total: int | None
    """None: a script's, and not told."""
    parameters_active: int | None
    estimates: tuple[CellEstimate, ...]
    """One a cell; none where a script trains."""
    totals: Totals
    constraints: tuple[Constraint, ...] = ()
    """The scarcest first: the first is the weakest link, the second the one behind it."""
    methods: tuple[MethodRow, ...] = ()
    changes: tuple[Change, ...] = ()
    balance: tuple[CellShare, ...] = ()
    """Empty where the cells are about equally fast."""
    relay_places: tuple[RelayPlace, ...] = ()
    """The best first; for up to 64 cells."""
    findings: tuple[Finding, ...] = ()
    feasible: bool

    @property
    def plan_hash(self) -> str:
        """The blake3 hash of the whole plan."""
        return digest(canonical_json(self.model_dump(mode="json")))

    @property
    def cost_per_hour(self) -> Figure | None:
        """US dollars an hour over all sites; None where a price is unknown."""
        return self.totals.cost_per_hour

    def site(self, name: str) -> SiteProfile:
        """The profile called ``name``."""
        return next(site for site in self.sites if site.name == name)


def config_hash(recipe: Recipe, cells: Sequence[CellPlan], files: Mapping[str, str] | None = None) -> str:
    """The hash of what decides the weights: model, data, training, exchange, the script, the cells' names and paces.

    Two runs with equal hashes learn the same; a packet or checkpoint of another hash is refused.
    """
    parts = recipe.model_dump(mode="json", include={"model", "data", "training"})
    parts["exchange"] = exchange_parts(recipe.exchange)
    if parts["data"] is not None:
        del parts["data"]["size"]  # told for the planner only
    if recipe.worker.command is not None:
        parts |= {"command": list(recipe.worker.command), "files": dict(files or {})}
    names = [cell.name for cell in cells]
    return digest(canonical_json({**parts, "cells": names, **paces([cell.window for cell in cells])}))
