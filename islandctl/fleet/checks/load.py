"""Nodes under load: matrix rate, heat and clocks, NVIDIA's own diagnosis, collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from islandctl.config.units import bytes_text, flops_text
from islandctl.fleet.checks.base import (
    Node,
    NodeCheck,
    Tier,
    Tool,
    Verdict,
    Verdicts,
    fail,
    listed,
    ok,
    skipped,
    warn,
    worker_program,
)
from islandctl.fleet.checks.smi import ALIASES, is_amd, number, nvidia, rows, untold, untold_table, word

HOT_C = 85.0
MEASURED_SHARE = 0.85
BUS = {"A100": 235.0, "H100": 366.0, "H200": 366.0, "B200": 838.0}
"""GB/s of an all-reduce inside one node of eight (ml-engineering; H200 with NVLS off)."""
BUS_SHARE = 0.85
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


class MatrixRate(NodeCheck):
    """GEMM."""

    name, tier, title = "matrix-rate", "standard", "the rate of large matrix products"
    threshold = "≥ 85 % of the best known of the type, and of the site's median"
    source = "ml-engineering: H100 reaches 80 % of its data sheet, B200 78 %, MI300X 51 %"
    remedy = "look at clocks and heat (the check gpu-heat); a slow accelerator slows all others of its cell"
    deadline_s = 120.0
    measures = True

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        gpus = node.has_gpus
        seconds = min(node.wanted.seconds or (30.0 if gpus and node.tier == "deep" else 3.0), 30.0)
        told = node.worker_python(
            "matrix",
            timeout_s=110.0,
            device="cuda" if gpus else "cpu",
            precision="bfloat16" if gpus else node.wanted.precision,
            size=8192 if gpus else 768,
            seconds=seconds,
            threads=max(1, node.site.cpu.cores // node.ranks),
            queries=[_heat_query(), _heat_query(old=True)] if gpus and not is_amd(node) else [],
        )
        no = without_torch(told)
        if no is not None:
            return no
        node.facts["under_load"] = told.get("under_load", "")
        node.facts["matrix_rate"] = median(told["rates"])
        return judge_matrix(told, best=node.wanted.matrix_flops, kind=node.site.gpu.type)


def _heat_query(*, old: bool = False) -> list[str]:
    """What tells heat, clocks and PCIe; ``old``: in the words of drivers before 535."""
    names = [f"clocks_event_reasons.{name}" for name in SLOWDOWNS]
    names = [ALIASES[name] for name in names] if old else names
    fields = ["index", "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max", *names]
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"]


def without_torch(told: dict[str, Any]) -> Verdict | None:
    """Why a program in the workers' interpreter gave no figures; None: it did."""
    if "unbuilt" in told:
        return skipped("no environment is there yet: launch builds it")
    if told.get("late"):
        return Verdict("unknown", str(told["error"]))
    if "No module named 'torch'" in str(told.get("error", "")):
        return skipped(f"{told['error']}")
    return fail(str(told["error"])) if "error" in told else None


def judge_matrix(told: dict[str, Any], *, best: float | None, kind: str) -> Verdict:
    """``told``: ``rates`` over time, FLOP/s of each accelerator while all work; ``each``: every one alone."""
    rate, devices = median(told["rates"]), told["devices"]
    if not devices:
        return fail("torch sees no accelerator", hint="a build of torch for the processor? see the check software")
    alone = told.get("each", [])
    text = flops_text(rate) + (f" on each of {devices}, all at once" if devices > 1 else "")
    figures: dict[str, Any] = {"value": rate, "unit": "FLOP/s", "measured": {"gpu.bf16": rate}}
    if alone:
        slow = [f"GPU {at}: {flops_text(one)}" for at, one in enumerate(alone) if one < 0.9 * median(alone)]
        if slow:
            return fail(f"{text}; slower than their neighbours: {listed(slow)}", **figures)
    if best is not None and kind != "cpu":
        figures["threshold"] = flops_text(MEASURED_SHARE * best)
        if rate < MEASURED_SHARE * best:
            return fail(f"{text}: {rate / best:.0%} of the best that is known", **figures)
    return ok(text, **figures)


class GpuHeat(NodeCheck):
    """Clocks and temperature."""

    name, tier, title = "gpu-heat", "quick", "no slow-down by heat or power; after the products, where they were run"
    threshold = "no thermal or power-brake slow-down, at most 85 °C; under load PCIe at its full generation"
    source = "facebookresearch/gcm's examples"
    remedy = "airflow or a power cap (nvidia-smi -q -d PERFORMANCE); give the node back if it stays"
    measures = True

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = nvidia(node)
        if no is not None:
            return no
        hot = node.facts.get("under_load", "")
        if hot:
            return judge_heat(Tool(0, hot, "", ""), loaded=True)
        return judge_heat(node.tool(_heat_query(), aliases=ALIASES), loaded=False)


def judge_heat(tool: Tool, *, loaded: bool) -> Verdict:
    """Temperatures and reasons for lower clocks; drivers before 535 call them throttle reasons."""
    no = untold_table(tool)
    if no is not None:
        return no
    table = rows(tool.out)
    degrees = {word(row, "index"): number(row, "temperature.gpu") for row in table}
    slowed = [
        f"GPU {word(row, 'index')} {name}"
        for row in table
        for name in SLOWDOWNS
        if word(row, f"clocks_event_reasons.{name}").lower() == "active"
    ]
    gens = [
        (word(row, "index"), number(row, "pcie.link.gen.current"), number(row, "pcie.link.gen.max")) for row in table
    ]
    low = [
        f"GPU {index} generation {now:.0f} of {most:.0f}" for index, now, most in gens if now and most and now < most
    ]
    hottest = max((one for one in degrees.values() if one is not None), default=None)
    when = "under load" if loaded else "at rest"
    if slowed:
        return fail(f"slowed {when}: {listed(slowed)}", value=hottest, unit="°C")
    if loaded and low:
        return fail(f"PCIe under load: {listed(low)}", value=hottest, unit="°C")
    if hottest is None:
        return skipped("the driver does not tell temperatures")
    text = f"up to {hottest:.0f} °C {when}, no slow-down"
    return (warn if hottest > HOT_C else ok)(text, value=hottest, unit="°C")


class Dcgm(NodeCheck):
    """NVIDIA's diagnosis."""

    name, tier, title = "dcgm", "standard", "NVIDIA's own diagnosis (dcgmi diag; level 1, in the deep tier 3)"
    threshold, source = (
        "no test fails",
        "DCGM's documentation; only level 4 may show silent corruption (ml-engineering)",
    )
    remedy = "dcgmi diag -r 3 there tells more; give the node back"
    measures = True

    def deadline(self, tier: Tier, seconds: float | None = None) -> float:
        """Level 3 takes a quarter of an hour."""
        return 1900.0 if tier == "deep" else 110.0

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        level = "3" if node.tier == "deep" else "1"
        limit = self.deadline(node.tier) - 20.0
        return nvidia(node) or judge_dcgm(node.tool(["dcgmi", "diag", "-r", level, "-j"], timeout_s=limit))


def judge_dcgm(tool: Tool) -> Verdict:
    """JSON of DCGM 3 and 4, or the table of older ones."""
    no = untold(tool, "dcgmi")
    if no is not None:
        return no
    if re.search(r"unable to (establish a connection|connect)|host engine.*not running", tool.text, re.I):
        return skipped("dcgmi finds no host engine: nv-hostengine, or the service nvidia-dcgm, does not run")
    tests = list(_dcgm_json(tool.out)) or list(_dcgm_table(tool.out))
    failed = sorted({name for name, status in tests if status.startswith("fail")})
    warned = sorted({name for name, status in tests if status.startswith("warn")})
    passed = sum(status.startswith("pass") for _, status in tests)
    if failed:
        return fail(f"failed: {listed(failed)}", value=len(failed), unit="tests")
    if warned:
        return warn(f"warnings: {listed(warned)}", value=len(warned), unit="tests")
    if not passed:
        said = next((line.strip() for line in tool.text.splitlines() if line.strip()), "no output")
        return skipped(f"dcgmi ran no test: {said[:120]}")
    return ok(f"{passed} tests passed", value=0, unit="tests failed")


def _dcgm_json(text: str) -> Iterator[tuple[str, str]]:
    """(test, status) of whatever lies under ``tests``, in the forms of both versions."""
    try:
        whole = json.loads(text[text.index("{") :])
    except ValueError:
        return
    stack = [whole]
    while stack:
        found = stack.pop()
        if isinstance(found, list):
            stack += found
        elif isinstance(found, dict):
            if "name" in found and "results" in found:
                for result in found["results"]:
                    yield str(found["name"]), str(result.get("status", "")).lower()
            else:
                stack += found.values()


def _dcgm_table(text: str) -> Iterator[tuple[str, str]]:
    """Rows such as ``| Memory  | Fail - GPU: 3 |``."""
    for name, status in re.findall(r"^\|\s*([A-Za-z][\w /]*?)\s*\|\s*(Pass|Fail|Warn|Skip)\b", text, re.M):
        yield name, status.lower()


class NodeCollective(NodeCheck):
    """All-reduce between the node's ranks."""

    name, tier, title = "all-reduce", "standard", "an all-reduce over the node's ranks (NCCL; gloo on processors)"
    threshold, source = "≥ 85 % of A100 235, H100/H200 366, B200 838 GB/s on eight", "ml-engineering"
    remedy = "NVLink, fabric manager, and NCCL's own words: NCCL_DEBUG=INFO"
    deadline_s = 120.0
    measures = True

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        if node.ranks < 2:
            return skipped("one rank on this node")
        port = node.ask("free_port", timeout_s=10.0)["port"]
        args = reduce_args(node, node.ranks, 0, "127.0.0.1", port)
        told = node.worker_python("all_reduce", timeout_s=100.0, **args)
        no = without_torch(told)
        return no or judge_reduce(told, kind=node.site.gpu.type, ranks=node.ranks)


def reduce_args(node: Node, world: int, first: int, address: str, port: int) -> dict[str, Any]:
    """What ``worker/examined.py`` is told for one node's share."""
    gpus = node.has_gpus
    return {
        "program": worker_program(),
        "device": "cuda" if gpus else "cpu",
        "world": world,
        "first_rank": first,
        "ranks": node.ranks,
        "address": address,
        "port": port,
        "interface": "",
        "bytes": (1 << 30) if gpus else (4 << 20),
        "times": 8 if gpus else 3,
        "deadline_s": 80.0,
    }


def judge_reduce(told: dict[str, Any], *, kind: str, ranks: int) -> Verdict:
    """The slowest rank's bus bandwidth, and whether the sum was right everywhere."""
    wrong = [one["rank"] for one in told["answers"] if not one["right"]]
    bus = min(one["bus"] for one in told["answers"])
    figures: dict[str, Any] = {"value": bus, "unit": "B/s"}
    if wrong:
        return fail(f"the sum is wrong on rank {listed(wrong)}", **figures)
    text = f"{bytes_text(bus)}/s between {ranks} ranks"
    known = next((rate for name, rate in BUS.items() if kind.upper().startswith(name)), None)
    if known is not None and ranks == 8:
        figures["threshold"] = f"{BUS_SHARE * known:.0f} GB/s"
        if bus < BUS_SHARE * known * 1e9:
            return fail(text, **figures)
    if any("NET/Socket" in line for line in told.get("lines", ())) and kind != "cpu":
        return warn(f"{text}, over TCP (NET/Socket) in place of RDMA", **figures)
    return ok(text, **figures)
