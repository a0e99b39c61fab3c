"""Who runs where: cells and their nodes, from sites and recipe."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from islandctl.config.load import Loaded
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError
from islandctl.ledger.pairs import nearest_powers
from islandctl.planner.plan import CellPlan, NodePlan


def make_cells(recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]]) -> tuple[CellPlan, ...]:
    """Spread the recipe's cells evenly over the sites, in the order given.

    Raises:
        ConfigError: no site, a site named twice, a number of cells that the mode cannot have or the sites cannot
            hold, or a batch that a cell's ranks cannot share evenly.
    """
    if not sites:
        raise ConfigError("no site given", hint="add --site PROFILE, once for each site")
    _refuse_equal_names(sites)
    num_cells = _num_cells(recipe, len(sites))
    cells: list[CellPlan] = []
    for site in sites:
        cells += _cells_of(site, num_cells // len(sites), len(cells))
    batch = recipe.value.training.batch
    for cell in cells:
        if batch % cell.num_ranks:
            lower = batch // cell.num_ranks * cell.num_ranks
            nearest = f"{lower} or {lower + cell.num_ranks}" if lower else str(cell.num_ranks)
            raise ConfigError(
                f"{recipe.at('training', 'batch')}: training.batch: {batch} sequences cannot be shared evenly by the "
                f"{cell.num_ranks} ranks of cell {cell.name}; nearest: {nearest}",
                hint="the batch is of a whole cell; change it, or gpu.count in the profile",
            )
    return tuple(cells)


def _refuse_equal_names(sites: Sequence[Loaded[SiteProfile]]) -> None:
    seen: dict[str, Loaded[SiteProfile]] = {}
    for site in sites:
        first = seen.setdefault(site.value.name, site)
        if first is not site:
            raise ConfigError(
                f"{site.at('name')}: site name '{site.value.name}' is taken by {first.at('name')}",
                hint="give each profile its own name",
            )


def _num_cells(recipe: Loaded[Recipe], num_sites: int) -> int:
    exchange = recipe.value.exchange
    num_cells = exchange.cells or num_sites
    place = recipe.at("exchange", "cells" if exchange.cells else "mode")
    if exchange.mode == "none" and (num_cells != 1 or num_sites != 1):
        raise ConfigError(
            f"{place}: mode none trains one cell on one site, here are {num_cells} cells on {num_sites} sites",
            hint="give one --site, or set exchange.mode: two-site",
        )
    if exchange.mode == "two-site" and num_cells < 2:
        raise ConfigError(
            f"{place}: mode two-site needs at least two cells, here is one site",
            hint="add another --site, or set exchange.mode: none",
        )
    if exchange.mode == "butterfly" and (num_cells < 2 or num_cells & (num_cells - 1)):
        nearest = " or ".join(str(one) for one in nearest_powers(num_cells))
        raise ConfigError(
            f"{place}: mode butterfly pairs 2, 4, 8, … cells, not {num_cells}; nearest: {nearest}",
            hint=_other_pairs(num_cells, num_sites),
        )
    if num_cells % num_sites:
        raise ConfigError(
            f"{place}: {num_cells} cells cannot be spread evenly over {num_sites} sites",
            hint=f"set exchange.cells to a multiple of {num_sites}"
            if exchange.mode == "two-site"
            else _other_pairs(num_cells, num_sites),
        )
    return num_cells


def _other_pairs(num_cells: int, num_sites: int) -> str:
    """What a butterfly needs to be possible: 2^k cells, as many on each site."""
    if num_sites & (num_sites - 1):
        sites = " or ".join(str(one) for one in nearest_powers(num_sites))
        return (
            f"give {sites} sites ({num_sites} cannot share 2, 4, 8, … cells evenly), or set exchange.mode: two-site"
        )
    fitting = [one for one in nearest_powers(num_cells) if one >= num_sites] or [num_sites]
    return f"set exchange.cells: {max(2, fitting[0])}"


def _cells_of(loaded: Loaded[SiteProfile], num_cells: int, first_index: int) -> list[CellPlan]:
    """The cells of one site: each a number of whole nodes, or an even part of one node."""
    site = loaded.value
    num_ranks, rest = divmod(site.gpu.count, num_cells)
    per_node = site.ranks_per_node
    if rest or not num_ranks or (num_ranks % per_node and per_node % num_ranks):
        raise ConfigError(
            f"{loaded.at('gpu', 'count')}: site {site.name}: {site.gpu.count} accelerators in nodes of {per_node} "
            f"cannot be shared evenly by {num_cells} cells",
            hint="a cell takes whole nodes, or an even part of one; change gpu.count or exchange.cells",
        )
    cells = []
    for number in range(num_cells):
        first_rank = number * num_ranks
        node_numbers = range(first_rank // per_node, -(-(first_rank + num_ranks) // per_node))
        nodes = tuple(  # checked above; thousands of them are made
            NodePlan.model_construct(index=index, host=_host(site, node), num_ranks=min(num_ranks, per_node))
            for index, node in enumerate(node_numbers)
        )
        name = site.name if num_cells == 1 else f"{site.name}-{number}"
        try:
            cells.append(CellPlan(index=first_index + number, name=name, site=site.name, nodes=nodes))
        except ValidationError as error:
            raise ConfigError(
                f"{loaded.at('name')}: site name '{site.name}' is too long to number its cells ({name})",
                hint="shorten the site's name",
            ) from error
    return cells


def _host(site: SiteProfile, node: int) -> str:
    """The profile's host of a node; of a Slurm site its login node, since Slurm chooses the nodes at start."""
    if not site.hosts:
        return ""
    return site.hosts[node if site.hosts_are_nodes else 0]
