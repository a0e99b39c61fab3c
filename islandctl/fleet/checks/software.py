"""What is installed, and whether it is alike where it must be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from islandctl.config.units import flops_text
from islandctl.fleet.checks.base import (
    FleetCheck,
    Node,
    NodeCheck,
    Verdict,
    Verdicts,
    fail,
    listed,
    ok,
    skipped,
    unknown,
    warn,
)

LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver that runs a CUDA release's programs (NVIDIA's table of minor version compatibility)."""


class Software(NodeCheck):
    """The workers' environment on one node."""

    name, tier, title = "software", "quick", "the workers' Python, torch, CUDA and NCCL; the driver is new enough"
    asks = ("host", "login", "job")
    threshold, source = (
        "Python ≥ 3.11, torch ≥ 2.10, a driver for its CUDA",
        "islandctl; NVIDIA's compatibility table",
    )
    remedy = "environment.python and environment.packages in the profile decide; environment.build: true builds one"
    deadline_s = 100.0

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        told = node.worker_python("versions", timeout_s=80.0)
        driver = ""
        if node.has_gpus:
            query = node.tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
            driver = query.out.strip().splitlines()[0].strip() if query.code == 0 and query.out.strip() else ""
        if "torch" in told:
            node.facts["software"] = {**told, "driver": driver}
        return judge_software(told, driver=driver, gpus=node.has_gpus)


def judge_software(told: dict[str, Any], *, driver: str, gpus: bool) -> Verdict:
    """What one node's environment holds."""
    if "unbuilt" in told:
        return skipped(f"no environment in {told['unbuilt']} yet: launch builds it")
    if told.get("late"):
        return unknown(str(told["error"]))
    if "error" in told:
        return fail(str(told["error"]))
    kind = f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['hip']}" if told["hip"] else "no CUDA"
    text = f"Python {told['version']}, torch {told['torch']} ({kind})"
    text += f", NCCL {told['nccl']}" if told.get("nccl") else ""
    text += f", driver {driver}" if driver else ""
    if numbers(told["version"])[:2] < (3, 11):
        return fail(f"{text}: Python 3.11 is the least", threshold="Python ≥ 3.11")
    if numbers(told["torch"])[:2] < (2, 10):
        return fail(f"{text}: torch 2.10 is the least", threshold="torch ≥ 2.10")
    least = LEAST_DRIVER.get(numbers(told["cuda"])[0]) if told["cuda"] else None
    if driver and least and numbers(driver)[:2] < least:
        return fail(f"{text}: this CUDA wants driver {'.'.join(map(str, least))}", hint="update the driver there")
    if gpus and not (told["cuda"] or told["hip"]):
        return fail(f"{text}: a build of torch for processors only", hint="environment.packages, pip_options")
    if gpus and not told["gpus"]:
        return fail(f"{text}: torch sees no accelerator")
    return ok(text)


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])) or (0,)


class Agreement(FleetCheck):
    """Alike over all sites."""

    name, tier, title = "agreement", "quick", "Python, torch, CUDA, NCCL and driver agree over nodes and sites"
    threshold = "NCCL and torch alike on all nodes of a site; over sites a difference deserves a word"
    source = "nccl#286; the exchange's arithmetic is bit-equal over versions, the training's is not"
    remedy = "pin the versions in environment.packages of every profile"

    def look(self, nodes: Sequence[Node]) -> Verdicts:
        """See ``FleetCheck``."""
        told = {node.label: (node.site.name, node.facts["software"]) for node in nodes if "software" in node.facts}
        return judge_agreement(told)


def judge_agreement(told: Mapping[str, tuple[str, dict[str, Any]]]) -> Verdict:
    """``told``: node → (its site, its versions). Names who differs from the most."""
    if len(told) < 2:
        return skipped("fewer than two nodes have told their versions")
    grave: list[str] = []
    light: list[str] = []
    for key, name in (
        ("version", "Python"),
        ("torch", "torch"),
        ("cuda", "CUDA"),
        ("nccl", "NCCL"),
        ("driver", "driver"),
    ):
        values = {place: str(versions.get(key) or "") for place, (_, versions) in told.items()}
        if len(set(values.values())) < 2:
            continue
        usual = max(sorted(set(values.values())), key=list(values.values()).count)
        who = [f"{place} {value or 'none'}" for place, value in values.items() if value != usual]
        line = f"{name} {usual or 'none'}, but {listed(who, 3)}"
        within = any(
            len({values[place] for place, (site, _) in told.items() if site == one}) > 1
            for one in {site for site, _ in told.values()}
        )
        (grave if within and key in ("torch", "nccl") else light).append(line)
    if grave:
        return fail("; ".join(grave + light))
    if light:
        return warn("; ".join(light))
    return ok(f"alike on {len(told)} nodes")


class SiteRate(FleetCheck):
    """The slowest node of a site."""

    name, scope, tier, title = "site-rate", "site", "standard", "no node of a site is slower than its neighbours"
    threshold, source = "≥ 90 % of the site's median matrix rate", "proposed; a cell is as fast as its slowest rank"
    remedy = "leave the node out of hosts, or give it back"

    def look(self, nodes: Sequence[Node]) -> Verdicts:
        """See ``FleetCheck``."""
        return judge_site_rate(
            {node.label: node.facts["matrix_rate"] for node in nodes if "matrix_rate" in node.facts}
        )


def judge_site_rate(rates: Mapping[str, float]) -> Verdict:
    """``rates``: node → FLOP/s of one of its accelerators."""
    if len(rates) < 2:
        return skipped("fewer than two nodes have been measured")
    middle = median(rates.values())
    slow = [f"{place} {rate / middle:.0%}" for place, rate in rates.items() if rate < 0.9 * middle]
    least = min(rates.values())
    figures: dict[str, Any] = {"value": least / middle, "unit": "of the median"}
    if slow:
        return fail(f"of the median {flops_text(middle)}: {listed(slow)}", **figures)
    return ok(f"{len(rates)} nodes within {1 - least / middle:.0%} of {flops_text(middle)}", **figures)
