"""What feeds the accelerators: the text in memory, how fast it is used up, and how long it takes to read."""

from __future__ import annotations

from islandctl.config.model import Model
from islandctl.config.recipe import STDLIB, DataRecipe, Recipe
from islandctl.config.site import SiteProfile
from islandctl.config.units import bytes_text, memory_text, seconds_text
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding

STDLIB_BYTES = 12e6
"""Sources of the Python library, as ``data.paths: [python-stdlib]`` reads them (3.11; assumed for others)."""
TOKEN_BYTES = 1
"""The text is read as bytes: a token is one."""
READING = 2
"""Times that a rank holds the text while it reads it."""
TOGETHER_BYTES_PER_S = 300e6
"""Of one rank that reads many files, where ``storage.read`` is not known (assumption)."""


class Feed(Model):
    """Of one cell. What is None hangs on a size or a step time that is not known."""

    text: Figure | None
    """Bytes that a rank holds at most."""
    rate: Figure | None
    """Bytes of text a second that the cell's ranks take together, out of memory."""
    load: Figure | None
    """Seconds in which the text is read at a start."""


def text_bytes(data: DataRecipe) -> tuple[float, str] | None:
    """How much text a rank holds, and how that is known; None: it is not."""
    if data.limit_bytes is not None:
        return float(data.limit_bytes), "data.limit_bytes"
    if data.size is not None:
        return float(data.size), "data.size"
    return (STDLIB_BYTES, "the Python library's sources") if data.paths == (STDLIB,) else None


def held_text(data: DataRecipe) -> Figure | None:
    """Bytes of text that one rank holds: whole while it trains, twice while it reads."""
    known = text_bytes(data)
    if known is None:
        return None
    size, words = known
    return Figure(
        value=size, low=size, high=READING * size, unit="B", formula=f"{words}; high: twice while it is read"
    )


def feed(recipe: Recipe, site: SiteProfile, cell: CellPlan, ranks_on_site: int, tokens: Figure | None) -> Feed:
    """What the cell's ranks take.

    Args:
        ranks_on_site: all of them read the whole text at once.
        tokens: the cell's tokens a second.
    """
    text = held_text(recipe.text)
    load = None
    if text is not None:
        rate = site.storage.read / ranks_on_site if site.storage.read else TOGETHER_BYTES_PER_S
        words = f"storage.read / {ranks_on_site} ranks" if site.storage.read else "0.3 GB/s a rank (assumed)"
        # ranks of one node read the same files: all but the first may find them in memory
        least = text.value / rate / cell.nodes[0].num_ranks if site.storage.read else text.value / rate
        load = Figure(
            value=text.value / rate, low=least, high=text.value / rate, unit="s",
            formula=f"{bytes_text(text.value)} / {words}; low: nodes read once",
        )  # fmt: skip
    rate_of = None
    if tokens is not None:
        rate_of = Figure(
            value=tokens.value * TOKEN_BYTES, low=tokens.low * TOKEN_BYTES, high=tokens.high * TOKEN_BYTES,
            unit="B/s", formula="tokens a second, one byte each, out of memory", assumed=tokens.assumed,
        )  # fmt: skip
    return Feed(text=text, rate=rate_of, load=load)


def feed_finding(estimate: CellEstimate, ranks_on_node: int) -> Finding:
    """How the cell is fed, in words."""
    held, load, rate = estimate.text, estimate.text_load, estimate.text_rate
    if held is None or load is None:
        return Finding(
            level="ok",
            place=estimate.cell,
            text=f"text: of unknown size, so its memory is left out; a node holds it {ranks_on_node} times",
            hint="give data.size in the recipe",
        )
    text = f"text: {ranks_on_node} × {memory_text(held.value)} in a node's memory, twice while it is read"
    text += f", {seconds_text(load.value)} at a start"
    if rate is not None:
        text += f"; the cell takes {bytes_text(rate.value)}/s of it"
    return Finding(level="ok", place=estimate.cell, text=text)
