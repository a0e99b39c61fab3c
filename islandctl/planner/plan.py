"""The Plan: everything resolved, frozen and hashed; what ``launch`` executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from islandctl.config.model import Model, Name
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.ledger.packet import canonical_json, digest

PLAN_VERSION = 1


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

    @property
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


class CellEstimate(Model):
    """What the plan expects of one cell."""

    cell: Name
    memory_per_rank: Figure
    memory_limit: Figure | None = None
    step: Figure | None = None
    """Seconds a step; None where the accelerator's rate is unknown."""
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


class Finding(Model):
    """Something that binds or deserves a word."""

    level: Literal["ok", "warn", "fail"]
    place: str
    text: str
    hint: str = ""


class Plan(Model):
    """A run, resolved. ``plan_hash`` covers all of it."""

    version: Literal[1] = 1
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
    cost_per_hour: Figure | None = None
    findings: tuple[Finding, ...] = ()
    feasible: bool

    @property
    def plan_hash(self) -> str:
        """The blake3 hash of the whole plan."""
        return digest(canonical_json(self.model_dump(mode="json")))

    def site(self, name: str) -> SiteProfile:
        """The profile called ``name``."""
        return next(site for site in self.sites if site.name == name)


def config_hash(recipe: Recipe, cells: tuple[str, ...], files: Mapping[str, str] | None = None) -> str:
    """The hash of what decides the weights: model, data, training, exchange, the script, and the cells' names.

    Two runs with equal hashes learn the same; a packet or checkpoint of another hash is refused.
    """
    parts = recipe.model_dump(mode="json", include={"model", "data", "training", "exchange"})
    if recipe.worker.command is not None:
        parts |= {"command": list(recipe.worker.command), "files": dict(files or {})}
    return digest(canonical_json({**parts, "cells": list(cells)}))
