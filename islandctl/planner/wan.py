"""What the link between the sites carries, how long a round takes, and what training hides of it."""

from __future__ import annotations

from collections.abc import Iterable

from islandctl.config.exchange import Exchange
from islandctl.config.model import Model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.fragments import PACKET_OVERHEAD_BYTES, FragmentSize
from islandctl.planner.plan import CellPlan, Figure

LINK_SHARE = 0.7
"""Share of the stated bandwidth that is reached in the worse case (assumption): other traffic, slow starts."""
ENCODE_VALUES_PER_S = 50e6
"""Values that one rank encodes, decodes and steps in a second, in the worse case (assumption)."""


STREAMS_PER_RANK = 4
"""Connections in each direction that a worker opens to the relay."""


class Link(Model):
    """One cell's way to the relay."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    streams: int
    """TCP connections that carry it."""
    stream_limit: float | None = None
    """Bytes per second that all of them carry at most: streams · window / RTT. None: emulated, no TCP to speak of."""


def tunnelled(site: SiteProfile, recipe: Recipe) -> bool:
    """Whether the site reaches the relay through a tunnel, one connection a node, that passes the controller."""
    return recipe.relay.address is None and site.scheduler != "local"


def link_of(site: SiteProfile, recipe: Recipe, cells_on_site: int, cell: CellPlan) -> Link:
    """The site's WAN, shared evenly by its cells; no faster than the link that the recipe emulates, and no faster
    than its TCP connections: each has at most a window on its way, so it carries window / RTT."""
    up, down, rtt = site.wan.up / cells_on_site, site.wan.down / cells_on_site, site.wan.rtt
    streams = len(cell.nodes) if tunnelled(site, recipe) else STREAMS_PER_RANK * cell.num_ranks
    emulate, limit = recipe.relay.emulate, None
    if emulate is not None:
        up, down, rtt = min(up, emulate.bandwidth), min(down, emulate.bandwidth), max(rtt, emulate.rtt)
    elif rtt > 0:
        limit = streams * site.wan.window / rtt
        up, down = min(up, 8 * limit), min(down, 8 * limit)
    return Link(up_bytes_per_s=up / 8, down_bytes_per_s=down / 8, rtt_s=rtt, streams=streams, stream_limit=limit)


def num_partners(exchange: Exchange, num_cells: int) -> int:
    """Cells whose packets a cell fetches: all others, or its one partner of the round. Its own it keeps."""
    return {"none": 0, "butterfly": 1, "two-site": num_cells - 1}[exchange.mode]


def volume(fragments: tuple[FragmentSize, ...], copies: int, codec: str, direction: str) -> Figure:
    """Bytes of one window in one direction, ``copies`` times the whole model."""
    payload = copies * sum(fragment.encoded_bytes for fragment in fragments)
    num_chunks = copies * sum(fragment.num_chunks for fragment in fragments)
    return Figure(
        value=payload,
        low=payload,
        high=payload + num_chunks * PACKET_OVERHEAD_BYTES,
        unit="B",
        formula=f"{direction}: {copies} × {sum(f.values for f in fragments)} values as {codec} (small ones as bf16)",
        assumed=False,
    )


def slowest_up(links: Iterable[Link]) -> Link:
    """The link whose packets come last."""
    return min(links, key=lambda link: link.up_bytes_per_s)


def round_time(
    fragments: tuple[FragmentSize, ...], cell: CellPlan, own: Link, slowest: Link, partners: int
) -> Figure:
    """Seconds of the largest fragment's round: snapshot, put, commit, fetch, outer step.

    A packet is given out only after its round's commit, so up and down follow one another:
    slowest cell's (bytes / up + RTT) + ½ RTT for the commit's news + partners · bytes / down + RTT.
    """
    if not partners:
        return Figure(value=0, low=0, high=0, unit="s", formula="nothing is exchanged", assumed=False)
    largest = max(fragments, key=lambda fragment: fragment.encoded_bytes)
    size = largest.encoded_bytes
    up = size / slowest.up_bytes_per_s + slowest.rtt_s
    down = partners * size / own.down_bytes_per_s + 1.5 * own.rtt_s
    compute = largest.values * (2 + partners) / cell.num_ranks / ENCODE_VALUES_PER_S
    return Figure(
        value=up + down,
        low=up + down,
        high=(up + down) / LINK_SHARE + compute,
        unit="s",
        formula=f"largest fragment {size / 1e6:.4g} MB: slowest cell's way up {up:.3g} s, then {partners} × down "
        f"{down:.3g} s; high: {LINK_SHARE:.0%} of the bandwidth, and coding at {ENCODE_VALUES_PER_S:.0e} values/s; "
        f"{_streams_words(own)}",
    )


def _streams_words(link: Link) -> str:
    """Whether bandwidth or the connections' windows bound the link."""
    if link.stream_limit is None:
        return "the link is emulated"
    needed = max(link.up_bytes_per_s, link.down_bytes_per_s) * link.rtt_s / link.streams
    return (
        f"{link.streams} connections carry {link.stream_limit / 1e9:.3g} GB/s at most; "
        f"bandwidth · RTT is {needed / 1e6:.3g} MB for each"
    )


def busy_time(fragments: tuple[FragmentSize, ...], link: Link, partners: int) -> float:
    """Seconds of every window in which the busier direction of the cell's link is occupied."""
    if not partners:
        return 0.0
    total = sum(fragment.encoded_bytes for fragment in fragments)
    return max(total / link.up_bytes_per_s, partners * total / link.down_bytes_per_s)


def hidden_time(recipe: Recipe, step: Figure | None) -> Figure | None:
    """Seconds of a round that pass while training goes on: overlap × step. None while the step is unknown."""
    if step is None:
        return None
    overlap = recipe.exchange.overlap
    return Figure(
        value=overlap * step.value,
        low=overlap * step.low,
        high=overlap * step.high,
        unit="s",
        formula=f"overlap {overlap} × step time",
    )


def link_share(recipe: Recipe, busy_s: float, step: Figure | None) -> Figure | None:
    """Share of a window's time in which the link is busy: at most 1, or training waits for it always."""
    if step is None:
        return None
    window = recipe.exchange.window
    return Figure(
        value=busy_s / (window * step.value),
        low=busy_s / (window * step.high),
        high=busy_s / (window * step.low),
        unit="",
        formula=f"busier direction {busy_s:.3g} s / (window {window} × step time)",
    )


def wait_per_window(recipe: Recipe, exchange: Figure, hidden: Figure | None) -> Figure | None:
    """Seconds of a window in which training stands still: fragments × what a round takes beyond the overlap."""
    if hidden is None:
        return None
    num = recipe.exchange.fragments
    return Figure(
        value=num * max(0.0, exchange.value - hidden.value),
        low=num * max(0.0, exchange.low - hidden.high),
        high=num * max(0.0, exchange.high - hidden.low),
        unit="s",
        formula=f"{num} fragments × (round − hidden)",
    )
