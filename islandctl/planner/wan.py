"""What the link between the sites carries, how long a round takes, and what training hides of it."""

from __future__ import annotations

from collections.abc import Iterable

from islandctl.config.exchange import Exchange
from islandctl.config.model import Model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.fragments import REQUEST_BYTES, FragmentSize, chunk_bytes
from islandctl.planner.plan import CellPlan, Figure

LINK_SHARE = 0.7
"""Share of the stated bandwidth that is reached in the worse case (assumption): other traffic, slow starts."""
ENCODE_VALUES_PER_S = 50e6
"""Values that one rank encodes, decodes and steps in a second, in the worse case (assumption)."""
BESIDE_TRAINING = 0.1
"""Of that, where training keeps the same processors busy (assumption)."""


HEADER_SPREAD = 0.005
"""Headers hold numbers and the run's name: their length varies by some letters."""
STREAMS_PER_RANK = 4
"""Connections in each direction that a worker opens to the relay."""


class Link(Model):
    """One cell's way to the relay."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    streams: int
    """TCP connections that carry it."""
    limit_bytes_per_s: float | None = None
    """What all of them carry at most; None: no round trip to speak of."""
    limit_words: str = ""
    """Why no more than that."""
    by_chunks: bool = False
    """The limit holds, and it is that of the chunks: then a round trip is in it already."""


def tunnelled(site: SiteProfile, recipe: Recipe) -> bool:
    """Whether the site reaches the relay through a tunnel, one connection a node, that passes the controller."""
    return recipe.relay.address is None and site.scheduler != "local"


def link_of(site: SiteProfile, recipe: Recipe, cells_on_site: int, cell: CellPlan) -> Link:
    """The site's WAN, shared evenly by its cells; no faster than the link that the recipe emulates, and no faster
    than its connections: TCP has at most a window on its way, so each carries window / RTT; and a worker's request
    carries one chunk and waits for its answer, so each carries chunk / RTT."""
    up, down, rtt = site.wan.up / cells_on_site, site.wan.down / cells_on_site, site.wan.rtt
    requests = STREAMS_PER_RANK * cell.num_ranks
    streams = len(cell.nodes) if tunnelled(site, recipe) else requests
    emulate = recipe.relay.emulate
    if emulate is not None:
        up, down, rtt = min(up, emulate.bandwidth), min(down, emulate.bandwidth), max(rtt, emulate.rtt)
    if rtt <= 0:
        return Link(up_bytes_per_s=up / 8, down_bytes_per_s=down / 8, rtt_s=rtt, streams=streams)
    chunk = chunk_bytes(recipe.exchange)
    of_chunks, of_windows = requests * chunk / rtt, streams * site.wan.window / rtt
    limit = of_chunks if emulate is not None else min(of_chunks, of_windows)  # an emulated link has no TCP
    words = (
        f"{requests} requests at a time of one chunk ({chunk / 1e6:.3g} MB)"
        if limit == of_chunks
        else f"{streams} connections of one window ({site.wan.window / 1e6:.3g} MB)"
    )
    return Link(
        up_bytes_per_s=min(up / 8, limit),
        down_bytes_per_s=min(down / 8, limit),
        rtt_s=rtt,
        streams=streams,
        limit_bytes_per_s=limit,
        limit_words=words,
        by_chunks=limit == of_chunks and limit < min(up, down) / 8,
    )


def num_partners(exchange: Exchange, num_cells: int) -> int:
    """Cells whose packets a cell fetches: all others, or its one partner of the round. Its own it keeps."""
    return {"none": 0, "butterfly": 1, "two-site": num_cells - 1}[exchange.mode]


def volume(fragments: tuple[FragmentSize, ...], copies: int, codec: str, direction: str) -> Figure:
    """Bytes of one window in one direction, ``copies`` times the whole model."""
    packets = copies * sum(fragment.with_headers(fragment.encoded_bytes) for fragment in fragments)
    num_chunks = copies * sum(fragment.num_chunks for fragment in fragments)
    return Figure(
        value=packets,
        low=packets * (1 - HEADER_SPREAD),
        high=packets * (1 + HEADER_SPREAD) + num_chunks * REQUEST_BYTES,
        unit="B",
        formula=f"{direction}: {copies} × {sum(f.values for f in fragments)} values as {codec} (small ones as bf16) "
        f"in {num_chunks} packets with their headers; high: and their HTTP requests",
        assumed=False,
    )


def slowest_up(links: Iterable[Link], size: float) -> Link:
    """The link on which ``size`` bytes come last."""
    return max(links, key=lambda link: size / link.up_bytes_per_s + link.rtt_s)


def round_time(
    fragments: tuple[FragmentSize, ...], cell: CellPlan, own: Link, slowest: Link, partners: int, *, on_cpu: bool
) -> Figure:
    """Seconds of the largest fragment's round: snapshot, put, commit, fetch, outer step.

    A packet is given out only after its round's commit, so up and down follow one another:
    slowest cell's (bytes / up + RTT) + ½ RTT for the commit's news + partners · bytes / down + RTT.

    Args:
        on_cpu: training takes the processors that encode and decode.
    """
    if not partners:
        return Figure(value=0, low=0, high=0, unit="s", formula="nothing is exchanged", assumed=False)
    largest = max(fragments, key=lambda fragment: fragment.encoded_bytes)
    size = largest.encoded_bytes
    up = size / slowest.up_bytes_per_s + slowest.rtt_s
    down = partners * size / own.down_bytes_per_s + 1.5 * own.rtt_s
    rate = ENCODE_VALUES_PER_S * (BESIDE_TRAINING if on_cpu else 1)
    compute = largest.values * (2 + partners) / cell.num_ranks / rate
    saved = slowest.by_chunks * slowest.rtt_s + own.by_chunks * own.rtt_s
    return Figure(
        value=up + down,
        low=up + down - saved,
        high=(up + down) / LINK_SHARE + compute,
        unit="s",
        formula=f"largest fragment {size / 1e6:.4g} MB: slowest cell's way up {up:.3g} s, then {partners} × down "
        f"{down:.3g} s; high: {LINK_SHARE:.0%} of the bandwidth, and coding at {rate:.0e} values/s; "
        f"{_streams_words(own)}",
    )


def _streams_words(link: Link) -> str:
    """What the connections carry by themselves."""
    if link.limit_bytes_per_s is None:
        return "no round trip bounds it"
    return f"{link.limit_words} / RTT carry {link.limit_bytes_per_s / 1e9:.3g} GB/s at most"


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


def wait_per_window(
    fragments: tuple[FragmentSize, ...], exchange: Figure, hidden: Figure | None, round_trips_s: float
) -> Figure | None:
    """Seconds of a window in which training stands still for rounds: what each takes beyond the overlap.

    Args:
        exchange: the largest fragment's round.
        round_trips_s: the part of it that does not depend on the fragment's size.
    """
    if hidden is None:
        return None
    largest = max(fragment.encoded_bytes for fragment in fragments)
    parts = [fragment.encoded_bytes / largest for fragment in fragments]

    def waits(longest: float, covered: float) -> float:
        fixed = min(round_trips_s, longest)
        return sum(max(0.0, fixed + (longest - fixed) * part - covered) for part in parts)

    return Figure(
        value=waits(exchange.value, hidden.value),
        low=waits(exchange.low, hidden.high),
        high=waits(exchange.high, hidden.low),
        unit="s",
        formula=f"{len(parts)} fragments, each by its size: round − hidden",
    )
