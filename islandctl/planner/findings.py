"""What binds in a plan: figures held against their limits, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.config.units import bits_per_s_text, bytes_text, memory_text, seconds_text
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.fragments import FragmentSize
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding, Totals
from islandctl.planner.wan import Link, tunnelled


def memory_finding(estimate: CellEstimate) -> Finding:
    """A rank's memory against its limit."""
    hint = "more accelerators in the cell, a smaller batch or sequence, or a smaller model"
    return _against("memory of a rank", estimate.cell, estimate.memory_per_rank, estimate.memory_limit, hint)


def node_memory_finding(estimate: CellEstimate) -> Finding | None:
    """A node's processor memory against cpu.memory, where the exchange's state lies there."""
    if estimate.node_memory is None:
        return None
    hint = "nodes with more memory, or more of them"
    return _against("memory of a node", estimate.cell, estimate.node_memory, estimate.node_memory_limit, hint)


def _against(what: str, place: str, need: Figure, limit: Figure | None, hint: str) -> Finding:
    span = f"{memory_text(need.low)} to {memory_text(need.high)}"
    if limit is None:
        return Finding(level="warn", place=place, text=f"{what}: needs {span}; what there is, is unknown")
    text = f"{what}: needs {memory_text(need.value)} ({span}), has {memory_text(limit.value)}"
    if need.value > limit.value:
        return Finding(level="fail", place=place, text=f"{text} ({limit.formula}): {need.formula}", hint=hint)
    if need.high > limit.value:
        return Finding(level="warn", place=place, text=f"{text} ({limit.formula}): may not fit", hint=hint)
    return Finding(level="ok", place=place, text=text)


def network_finding(site: SiteProfile, known: Accelerator, cell: CellPlan, estimate: CellEstimate) -> Finding | None:
    """A step time without the traffic inside the cell, because nobody has told how fast that is."""
    if estimate.step is None or not estimate.step.assumed or cell.num_ranks == 1:
        return None
    missing = ["network.bandwidth"] if len(cell.nodes) > 1 and site.network is None else []
    if known.link_bytes_per_s is None and cell.nodes[0].num_ranks > 1:
        missing.append("gpu.link")
    if not missing:
        return None
    return Finding(
        level="warn",
        place=cell.name,
        text=f"{' and '.join(missing)} not known: what the ranks gather and reduce there in every step is left out, "
        "so steps may take longer than this",
        hint=f"give {' and '.join(missing)} in the profile",
    )


def exchange_finding(recipe: Recipe, estimate: CellEstimate, busy_s: float, link: Link, site: SiteProfile) -> Finding:
    """A round against what training hides of it, and all rounds against the window."""
    exchange, need, step = recipe.exchange, estimate.exchange, estimate.run_step
    place = estimate.cell
    took = f"a round takes {seconds_text(need.value)} ({seconds_text(need.low)} to {seconds_text(need.high)})"
    if exchange.mode == "none":
        return Finding(level="ok", place=place, text="nothing is exchanged")
    window, overlap = exchange.window, exchange.overlap
    if step is None or estimate.overlap is None:
        enough = max(need.high / overlap if overlap else math.inf, busy_s / window)
        if math.isinf(enough):
            text = f"{took}, and overlap 0 hides nothing of it"
            return Finding(level="warn", place=place, text=text, hint="set exchange.overlap")
        text = f"{took}; the step time is unknown here: all is hidden if a step takes at least {seconds_text(enough)}"
        return Finding(level="ok", place=place, text=text)
    slower = f"{_wider(recipe, link, site)}, a smaller codec, or a longer window"
    longest = window * step.high
    if max(need.value, busy_s) > longest:
        text = (
            f"the exchange needs {seconds_text(max(need.value, busy_s))} of every window, but a window of {window} "
            f"steps lasts {seconds_text(longest)} at most: training would always wait"
        )
        return Finding(level="fail", place=place, text=text, hint=slower)
    if need.value > estimate.overlap.value:
        wait = estimate.wait_per_window
        waits = seconds_text(wait.value) if wait else "?"
        enough_steps = math.ceil(need.value / step.value)
        hides = (
            f"exchange.overlap: {enough_steps} hides it"
            if enough_steps < window
            else f"no overlap hides it: {slower}"
        )
        text = (
            f"{took}, overlap {overlap} hides {seconds_text(estimate.overlap.value)}: training waits up to "
            f"{seconds_text(need.value - estimate.overlap.value)} a round, {waits} a window"
        )
        return Finding(level="warn", place=place, text=text, hint=hides)
    if need.high > estimate.overlap.low:
        text = f"{took}, overlap {overlap} hides {seconds_text(estimate.overlap.value)}: at the worst not all of it"
        return Finding(level="ok", place=place, text=text)
    return Finding(level="ok", place=place, text=f"{took}, hidden by overlap {overlap}")


def _wider(recipe: Recipe, link: Link, site: SiteProfile) -> str:
    """What makes the way to the relay wider: the link itself only where it is what is narrow."""
    if not link_words(link):
        return "a faster link"
    if link.by_chunks:
        return "a larger exchange.chunk"
    return "relay.address" if tunnelled(site, recipe) else "a larger wan.window (net.ipv4.tcp_wmem on the nodes)"


def deadline_finding(recipe: Recipe, fragments: tuple[FragmentSize, ...], links: dict[str, Link]) -> Finding | None:
    """Rounds that can never be complete before their deadline."""
    if recipe.exchange.mode == "none":
        return None
    size = max(fragment.encoded_bytes for fragment in fragments)
    name, link = min(links.items(), key=lambda item: item[1].up_bytes_per_s)
    up = size / link.up_bytes_per_s
    if up <= recipe.exchange.late.deadline:
        return None
    text = (
        f"the largest fragment needs {seconds_text(up)} at {bits_per_s_text(link.up_bytes_per_s * 8)}, longer than "
        f"exchange.late.deadline {seconds_text(recipe.exchange.late.deadline)}: its rounds would all end empty"
    )
    return Finding(level="fail", place=name, text=text, hint="more fragments, a longer deadline, or a faster link")


def storage_finding(recipe: Recipe, checkpoint: float, site: SiteProfile, cells_on_site: int) -> Finding | None:
    """Kept checkpoints of ``checkpoint`` bytes, and the one being written, against the free storage."""
    if site.storage.free is None:
        if site.gpu.type == CPU:
            return None
        missing = "storage" if site.storage.write is None else "storage.free"
        return Finding(
            level="warn",
            place=f"site {site.name}",
            text=f"{missing} is not known: checkpoints are left out here, their space and what they cost in time"
            if site.storage.write is None
            else f"{missing} is not known: whether checkpoints fit is left out",
            hint=f"give {missing} in the profile",
        )
    keep = max(2, recipe.checkpoint.keep)  # as the worker has it
    need = checkpoint * (keep + 1) * cells_on_site
    text = (
        f"checkpoints: {keep} kept and one being written need {bytes_text(need)}, "
        f"{bytes_text(site.storage.free)} are free"
    )
    if need > site.storage.free:
        return Finding(
            level="fail", place=f"site {site.name}", text=text, hint="lower checkpoint.keep, or more space"
        )
    return Finding(level="ok", place=f"site {site.name}", text=text)


def checkpoint_finding(recipe: Recipe, totals: Totals) -> Finding | None:
    """How often checkpoints are written against how often losing least asks for."""
    best, lost = totals.best_checkpoint_every, totals.lost
    if best is None or lost is None:
        return None
    every = recipe.checkpoint.every
    text = (
        f"checkpoints every {every} steps, one failure in {seconds_text(totals.between_failures.value)}: "
        f"{lost.value:.1%} of the time is lost"
        if totals.between_failures
        else ""
    )
    if best.low / 3 <= every <= 3 * best.high:
        return Finding(level="ok", place="checkpoints", text=text)
    return Finding(
        level="warn",
        place="checkpoints",
        text=text,
        hint=f"least is lost with checkpoint.every between {best.low:.0f} and {best.high:.0f} steps",
    )


def tunnel_finding(recipe: Recipe, sites: Iterable[SiteProfile], links: Mapping[str, Link]) -> Finding | None:
    """Sites whose packets all pass the controller's own line, which no profile describes.

    Args:
        links: by cell; a site's first cell has the site's name, or that and a number.
    """
    through = [site for site in sites if tunnelled(site, recipe)]
    if not through or recipe.exchange.mode == "none" or recipe.relay.emulate is not None:
        return None
    narrow = [
        (links[name], site.name) for site in through for name in _cells_of(site, links) if link_words(links[name])
    ]
    also = ""
    if narrow:
        link, name = min(narrow, key=lambda one: one[0].limit_bytes_per_s or 0.0)
        also = f", and in {name} {link_words(link)}"
    names = _together([site.name for site in through])
    text = f"reached through tunnels of this machine by {names}: its own line is not in the plan{also}"
    hint = "set relay.address, where the sites can reach the relay directly"
    return Finding(level="warn", place="relay", text=text, hint=hint)


def _cells_of(site: SiteProfile, links: Mapping[str, Link]) -> list[str]:
    return [name for name in (site.name, f"{site.name}-0") if name in links][:1]


def link_words(link: Link) -> str:
    """What the cell's connections carry, where that is less than the link. Empty: the link is the narrower one."""
    limit = link.limit_bytes_per_s
    if limit is None or limit > min(link.up_bytes_per_s, link.down_bytes_per_s):
        return ""
    number, what = link.limit_words.split(" ", 1)
    verb = "carry"
    if number == "1":
        what, verb = what.replace("connections", "connection").replace("requests", "request"), "carries"
    return f"{number} {what} {verb} no more than {bits_per_s_text(limit * 8).split(' (')[0]}"


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first; findings that say the same of several places become one."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        places.setdefault((finding.level, finding.text, finding.hint), []).append(finding.place)
    order = ("fail", "warn", "ok")
    return tuple(
        Finding(level=level, place=_together(names), text=text, hint=hint)  # type: ignore[arg-type]
        for (level, text, hint), names in sorted(places.items(), key=lambda item: order.index(item[0][0]))
    )


def _together(places: list[str]) -> str:
    return ", ".join(places) if len(places) <= 2 else f"{places[0]} … {places[-1]} ({len(places)})"
