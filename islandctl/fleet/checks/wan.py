"""The link to the relay, over the very way that a run takes: round trips, rates, what is lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from islandctl.config.units import bits_per_s_text, seconds_text
from islandctl.errors import IslandError
from islandctl.fleet.checks.base import (
    Link,
    LinkCheck,
    Tier,
    Verdict,
    Verdicts,
    Way,
    fail,
    listed,
    ok,
    skipped,
    source,
    warn,
)
from islandctl.fleet.checks.to_relay import DRAIN_S

LOSS = 1e-3
WINDOW_BOUND = 0.7
"""One stream that carries less than this share of what several carry is held back by its window, or by loss."""
REACH_S, REFUSED_S = 30.0, 2.0
"""For a tunnel to come up and a relay to answer; where a tunnel has just been refused."""


def ask_way(link: Link, way: Way, timeout_s: float, **args: Any) -> Any:
    """Have a node ask the relay; token and certificate travel on stdin."""
    given = {"url": way.url, "token": way.token, "certificate": link.certificate, **args}
    return way.node.open().python(source("to_relay.py"), given, timeout_s=timeout_s + 15.0)


class RelayReach(LinkCheck):
    """Does every node reach the relay, and how far is it?"""

    name, tier, title = "relay", "quick", "every node reaches the relay as a run would; round trips, median and p95"
    threshold, source = "every node; ≤ 1.5 × wan.rtt of the profile; MTU told where it can be", "proposed"
    remedy = "--write-profile puts the time into wan.rtt; where it is blocked: a firewall, or no forwarding"
    deadline_s = 120.0
    measures = False

    def look(self, link: Link) -> Verdicts:
        """See ``LinkCheck``."""
        count = 20 if link.ways[0].node.tier == "quick" else 100
        told: dict[str, dict[str, Any]] = {}

        def ask(way: Way) -> None:
            try:
                patience_s = REACH_S if way.node.facts.get("forwards", True) else REFUSED_S
                asked = {"do": "trips", "count": count, "patience_s": patience_s}
                told[way.node.label] = ask_way(link, way, 2 * REACH_S + 20.0, **asked)
            except IslandError as error:
                told[way.node.label] = {"error": error.message}
            if "error" in told[way.node.label] and (why := link.trouble(way)):
                told[way.node.label]["error"] += f"; its tunnel: {why}"

        together(ask, link.ways)
        return judge_reach(told, rtt_s=link.site.wan.rtt)


def together(work: Any, ways: Sequence[Way]) -> None:
    """Do the work for all ways at the same time."""
    begun = [threading.Thread(target=work, args=(way,), daemon=True) for way in ways]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()


def judge_reach(told: Mapping[str, Mapping[str, Any]], *, rtt_s: float) -> Verdict:
    """``told``: node → ``trips`` (seconds each) and ``mtu``, or ``error``."""
    blocked = [f"{label} → relay: {one['error']}" for label, one in told.items() if "error" in one]
    if blocked:
        hint = "a firewall on the way, or no tunnel: islandctl doctor --only forwarding"
        return fail(f"blocked: {listed(blocked, 3)}", value=len(blocked), unit="nodes", hint=hint)
    trips = sorted(trip for one in told.values() for trip in one["trips"])
    middle, slow = median(trips), trips[int(0.95 * (len(trips) - 1))]
    mtu = next((one["mtu"] for one in told.values() if one.get("mtu")), None)
    text = (
        f"{len(told)} node{'s' if len(told) > 1 else ''}, round trip {seconds_text(middle)}, p95 {seconds_text(slow)}"
    )
    text += f", MTU {mtu}" if mtu else ""
    figures: dict[str, Any] = {"value": middle, "unit": "s", "measured": {"wan.rtt": middle}}
    if rtt_s and middle > 1.5 * rtt_s:
        threshold = f"1.5 × wan.rtt {seconds_text(rtt_s)}"
        return warn(f"{text}: wan.rtt says {seconds_text(rtt_s)}", threshold=threshold, **figures)
    return ok(text, **figures)


@dataclass(frozen=True)
class Rate:
    """What one direction carried, second by second."""

    p10: float
    """bit/s that nine seconds of ten reach."""
    mean: float


def rate_of(nodes: Sequence[Sequence[int]]) -> Rate:
    """Bytes of every second, of all nodes at once. The first, in which TCP starts, and the last are left out."""
    length = min(len(seconds) for seconds in nodes)
    whole = [sum(seconds[at] for seconds in nodes) for at in range(length)]
    kept = sorted(whole[1:-1] or whole)
    return Rate(p10=8.0 * kept[int(0.1 * (len(kept) - 1))], mean=8.0 * sum(kept) / len(kept))


class WanRate(LinkCheck):
    """How much passes, each way, with one connection and with as many as the workers use."""

    name, tier, title = "wan", "standard", "bandwidth to and from the relay, one stream and many, all sites at once"
    threshold, source = (
        "p10 ≥ 90 % of wan.up and wan.down; below 50 % fails",
        "proposed: a round waits for the slow second",
    )
    remedy = "--write-profile puts the figures into wan.up and wan.down; then plan again"

    def deadline(self, tier: Tier, seconds: float | None = None) -> float:
        """Four measurements, and what connections and slow nodes take."""
        return 4.0 * (_seconds(tier, seconds) + 30.0) + 2 * DRAIN_S

    def look(self, link: Link) -> Verdicts:
        """See ``LinkCheck``."""
        node = link.ways[0].node
        seconds = _seconds(node.tier, node.wanted.seconds)
        told: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for direction in ("up", "down"):
            for streams in dict.fromkeys((1, link.streams)):
                told[direction, streams] = self._measure(link, direction, streams, seconds)
        return judge_wan(told, link)

    @staticmethod
    def _measure(link: Link, direction: str, streams: int, seconds: float) -> list[dict[str, Any]]:
        """All of the site's nodes, or as many as there are streams, at the same time."""
        ways = link.ways[:streams]
        found: list[dict[str, Any]] = []

        def ask(way: Way) -> None:
            share = streams // len(ways) + (ways.index(way) < streams % len(ways))
            try:
                asked = {"do": direction, "streams": share, "seconds": seconds}
                found.append(ask_way(link, way, seconds + DRAIN_S + 10.0, **asked))
            except IslandError as error:
                found.append({"error": error.message})

        together(ask, ways)
        return found


def _seconds(tier: Tier, wanted: float | None) -> float:
    return wanted or (30.0 if tier == "deep" else 8.0)


def judge_wan(told: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], link: Link) -> list[Verdict]:
    """One verdict a direction, one for what is lost. ``told``: (direction, streams) → each node's ``seconds``."""
    verdicts = []
    for direction, said in (("up", link.site.wan.up), ("down", link.site.wan.down)):
        errors = [
            one["error"] for (way, _), nodes in told.items() if way == direction for one in nodes if "error" in one
        ]
        if errors:
            verdicts.append(fail(f"{direction}: {errors[0]}"))
            continue
        rates = {
            streams: rate_of([one["seconds"] for one in nodes])
            for (way, streams), nodes in told.items()
            if way == direction
        }
        verdicts.append(_judge_direction(direction, rates, said))
    verdicts.append(judge_loss(told, tunnelled=link.tunnelled))
    return verdicts


def _judge_direction(direction: str, rates: Mapping[int, Rate], said: float) -> Verdict:
    one, many = rates[1], rates[max(rates)]
    best = max(many.p10, one.p10)
    text = f"{direction}: p10 {bits_per_s_text(best)}, mean {bits_per_s_text(max(many.mean, one.mean))}"
    share = one.p10 / many.p10 if many.p10 else 0.0
    if len(rates) > 1:
        text += f"; 1 stream : {max(rates)} = {share:.2f}"
    figures: dict[str, Any] = {
        "value": best,
        "unit": "bit/s",
        "threshold": f"90 % of wan.{direction} {bits_per_s_text(said)}",
        "measured": {f"wan.{direction}": best},
    }
    hint = (
        "one connection is held back: net.ipv4.tcp_rmem and tcp_wmem, or loss on the way"
        if share < WINDOW_BOUND
        else ""
    )
    if best < 0.5 * said:
        return fail(text, **figures)
    if best < 0.9 * said:
        return warn(text, **figures)
    return ok(text, hint=hint, **figures) if len(rates) > 1 else ok(text, **figures)


def judge_loss(told: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], *, tunnelled: bool) -> Verdict:
    """TCP's own count of what was sent twice (TCP_INFO), uploads only: downloads are counted at the other end."""
    if tunnelled:
        return skipped("loss: the tunnel's own connection belongs to ssh, and only it knows")
    sent = sum(one.get("segments", 0) for (way, _), nodes in told.items() if way == "up" for one in nodes)
    again = sum(one.get("again", 0) for (way, _), nodes in told.items() if way == "up" for one in nodes)
    if not sent:
        return skipped("loss: on one machine, or a system without TCP_INFO")
    share = again / sent
    text = f"loss: {share:.3%} of the segments were sent again"
    hint = "a bad link or a full queue: fewer streams, or another route"
    if share >= LOSS:
        return warn(text, value=share, threshold="0.1 %", hint=hint)
    return ok(text, value=share, threshold="0.1 %")
