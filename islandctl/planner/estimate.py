"""What the plan expects of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from islandctl.config.model import Model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner import feed, memory, speed, storage, wan
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.layout import Layout
from islandctl.planner.pace import window_figures
from islandctl.planner.parameters import Counts
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, scaled
from islandctl.planner.schedule import Runner, alone_s, play


class Setting(Model):
    """A recipe on its sites, resolved: what every formula asks for."""

    recipe: Recipe
    sites: dict[str, SiteProfile]
    accelerators: dict[str, Accelerator]
    """By site."""
    cells: tuple[CellPlan, ...]
    counts: Counts
    fragments: tuple[FragmentSize, ...]
    links: dict[str, wan.Link]
    """By cell."""
    cells_on: dict[str, int]
    """By site."""

    @property
    def partners(self) -> int:
        """Cells whose packets a cell fetches in a round."""
        return wan.num_partners(self.recipe.exchange, len(self.cells))


def resolve(
    recipe: Recipe,
    counts: Counts,
    fragments: tuple[FragmentSize, ...],
    cells: tuple[CellPlan, ...],
    known: Mapping[str, tuple[SiteProfile, Accelerator]],
) -> Setting:
    """Put together what the formulas ask for; the recipe's number of cells is filled in."""
    exchange = recipe.exchange.model_copy(update={"cells": len(cells)})
    recipe = recipe.model_copy(update={"exchange": exchange})
    cells_on = Counter(cell.site for cell in cells)
    return Setting.model_construct(
        recipe=recipe,
        sites={name: site for name, (site, _) in known.items()},
        accelerators={name: accelerator for name, (_, accelerator) in known.items()},
        cells=cells,
        counts=counts,
        fragments=fragments,
        links={cell.name: wan.link_of(known[cell.site][0], recipe, cells_on[cell.site], cell) for cell in cells},
        cells_on=dict(cells_on),
    )


def estimates(setting: Setting) -> tuple[CellEstimate, ...]:
    """Every cell by itself, and then all of them together: who waits."""
    shared = _Shared(setting)
    alone = [_alone(setting, cell, shared) for cell in setting.cells]
    windows = window_figures(setting.recipe.exchange, setting.cells, [one.step for one in alone])
    if any(windows):
        alone = [one.model_copy(update={"window": own}) for one, own in zip(alone, windows, strict=True)]
    shares = _computing(setting, alone)
    return tuple(
        estimate.model_copy(update={"computing": share}) for estimate, share in zip(alone, shares, strict=True)
    )


class _Shared:
    """Figures that do not depend on the cell, or only on its size: computed once for a thousand of them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._parts: dict[tuple[int, bool], memory.RankMemory] = {}
        self._saved: dict[int, int] = {}
        largest = max((fragment.encoded_bytes for fragment in setting.fragments), default=0)
        self.slowest_up = wan.slowest_up(setting.links.values(), largest)
        codec, partners = setting.recipe.exchange.codec, setting.partners
        self.sent = wan.volume(setting.fragments, min(1, partners), codec, "sent")
        self.fetched = wan.volume(setting.fragments, partners, codec, "fetched")

    def parts(self, num_ranks: int, on_cpu: bool) -> memory.RankMemory:
        key, one = (num_ranks, on_cpu), self._setting
        if key not in self._parts:
            layout = Layout(fsdp=num_ranks)
            self._parts[key] = memory.rank_parts(one.recipe, one.counts, one.fragments, layout, on_cpu)
        return self._parts[key]

    def saved(self, num_ranks: int) -> int:
        if num_ranks not in self._saved:
            one = self._setting
            self._saved[num_ranks] = storage.checkpoint_bytes(one.recipe, one.counts, one.fragments, num_ranks)
        return self._saved[num_ranks]


def _alone(setting: Setting, cell: CellPlan, shared: _Shared) -> CellEstimate:
    recipe, counts, fragments = setting.recipe, setting.counts, setting.fragments
    site, known, partners = setting.sites[cell.site], setting.accelerators[cell.site], setting.partners
    on_cpu = site.gpu.type == CPU
    cells_on_site = setting.cells_on[cell.site]
    cells_on_node = max(1, cells_on_site // site.num_nodes)
    parts = shared.parts(cell.num_ranks, on_cpu)
    step = speed.step_time(recipe, counts, site, known, cell)
    link = setting.links[cell.name]
    exchange = wan.round_time(fragments, cell, link, shared.slowest_up, partners, on_cpu=on_cpu)
    exchange = _or_measured(exchange, site, "exchange")
    pace = 1.0 if cell.window is None else cell.window / recipe.exchange.window
    run_step = scaled(step, pace)
    hidden = wan.hidden_time(recipe, run_step)
    saved = shared.saved(cell.num_ranks)
    tokens = speed.tokens_per_s(recipe, step)
    ranks_on_node = cell.nodes[0].num_ranks * cells_on_node
    taken = feed.feed(recipe, site, cell, cell.num_ranks * cells_on_site, tokens)
    return CellEstimate(
        cell=cell.name,
        memory_per_rank=memory.rank_memory(parts, on_cpu, site.measured, taken.text),
        memory_limit=memory.rank_limit(site, known, cells_on_node, cell),
        step=step,
        pace=pace,
        utilisation=None if step is None else speed.utilisation(recipe, counts, known, cell, step),
        tokens_per_s=tokens,
        bytes_up_per_window=_or_measured(shared.sent, site, "sent"),
        bytes_down_per_window=_or_measured(shared.fetched, site, "fetched"),
        exchange=exchange,
        overlap=hidden,
        wait_per_window=wan.wait_per_window(
            fragments, exchange, hidden, shared.slowest_up.rtt_s + 1.5 * link.rtt_s if partners else 0.0
        ),
        link_share=wan.link_share(recipe, wan.busy_time(fragments, link, partners), run_step),
        node_memory=None
        if on_cpu
        else memory.node_memory(recipe, counts, fragments, cell, ranks_on_node, taken.text),
        node_memory_limit=None if on_cpu else _whole_node(site),
        checkpoint_bytes=Figure(
            value=saved, low=saved, high=saved, unit="B", assumed=False,
            formula=f"weights, {recipe.training.inner.kind}, the exchange's state and what is in flight",
        ),
        checkpoint_write=storage.write_time(saved, site, cells_on_site, cell.num_ranks),
        text=taken.text,
        text_rate=taken.rate,
        text_load=taken.load,
    )  # fmt: skip


def _or_measured(planned: Figure, site: SiteProfile, key: Literal["sent", "fetched", "exchange"]) -> Figure:
    """What a run has shown in place of what follows from the formulas."""
    seen = getattr(site.measured, key)
    if seen is None:
        return planned
    words = f"measured.{key} of {site.measured.source}"
    return Figure(value=seen, low=seen, high=seen, unit=planned.unit, formula=words, assumed=False)


def _whole_node(site: SiteProfile) -> Figure:
    size = site.cpu.memory
    return Figure(value=size, low=size, high=size, unit="B", formula="cpu.memory of the profile", assumed=False)


def _computing(setting: Setting, alone: Sequence[CellEstimate]) -> list[Figure | None]:
    """Each cell's share of the time in which it trains, from the schedule played out three times: as planned, at the
    worst (fast steps, ``LINK_SHARE`` of the bandwidth, slow coding) and at the best."""
    if any(estimate.step is None for estimate in alone):
        return [None] * len(alone)
    exchange = setting.recipe.exchange
    if not setting.partners:
        whole = Figure(value=1, low=1, high=1, unit="", formula="nothing is exchanged", assumed=False)
        return [whole] * len(alone)
    planned = shares(setting, alone)
    worst = shares(setting, alone, "low", of_bandwidth=wan.LINK_SHARE, coding=1.0)
    best = shares(setting, alone, "high")
    words = f"window {exchange.window}, {exchange.fragments} fragments, overlap {exchange.overlap} played out"
    return [
        Figure(value=value, low=min(value, low), high=max(value, high), unit="", formula=words)
        for value, low, high in zip(planned, worst, best, strict=True)
    ]


def shares(
    setting: Setting,
    estimates: Sequence[CellEstimate],
    step: Literal["low", "value", "high"] = "value",
    *,
    of_bandwidth: float = 1.0,
    coding: float = 0.0,
    bytes_per_s: float | None = None,
) -> list[float]:
    """Each cell's share of the time in which it trains. Every step time is known. Where a run has shown how long a
    round takes (``measured.exchange``), all of it takes as much longer or shorter.

    Args:
        step: which end of the step's range.
        of_bandwidth: share of the links' bandwidth that is reached.
        coding: times ``ENCODE_VALUES_PER_S`` that coding takes; 0: none.
        bytes_per_s: all links as fast as this, in place of their own bandwidth, but for what their connections carry.
    """
    sizes = [fragment.encoded_bytes for fragment in setting.fragments]
    per_byte = setting.counts.total / sum(sizes) / wan.ENCODE_VALUES_PER_S
    runners = []
    for cell, estimate in zip(setting.cells, estimates, strict=True):
        link = setting.links[cell.name]
        seen = setting.sites[cell.site].measured.exchange if bytes_per_s is None else None
        usual = alone_s(max(sizes), setting.partners, link.up_bytes_per_s, link.down_bytes_per_s, link.rtt_s)
        reached = of_bandwidth if seen is None else usual / seen
        rate = None if bytes_per_s is None else min(bytes_per_s, link.limit_bytes_per_s or bytes_per_s)
        runners.append(
            Runner(
                step_s=getattr(estimate.run_step, step),
                up_bytes_per_s=(rate or link.up_bytes_per_s) * reached,
                down_bytes_per_s=(rate or link.down_bytes_per_s) * reached,
                rtt_s=link.rtt_s if seen is None else link.rtt_s / reached,
                code_s=coding * per_byte / cell.num_ranks if seen is None else 0.0,
            )
        )
    return play(setting.recipe.exchange, sizes, runners).computing
