"""What a node is and allows: the way in, Python and PATH, memory, limits, clock, and what others have left there."""

from __future__ import annotations

import time
from typing import Any

from islandctl.config.units import bytes_text, memory_text, seconds_text
from islandctl.fleet.checks.base import Node, NodeCheck, Verdict, Verdicts, fail, listed, ok, skipped, warn
from islandctl.fleet.provision import CLOCK_LIMIT_S, CLOCK_WARN_S, clock_offset

SLOW_LOGIN_S = 15.0
SHM_BYTES = 8e9
NOFILE = 65_536


def system_facts(node: Node) -> dict[str, Any]:
    """What the node told of itself, asked once."""
    if "system" not in node.facts:
        sent = time.time()
        told = node.ask("system", timeout_s=20.0)
        began, ended = told["clock"]
        told["offset_s"] = clock_offset(sent, began, ended, time.time())
        node.facts["system"] = told
    facts: dict[str, Any] = node.facts["system"]
    return facts


class Login(NodeCheck):
    """The way in."""

    name, tier, title = "login", "quick", "SSH login with the profile's key (or a place in Slurm's job), and a Python"
    asks = ("host", "login", "job")
    threshold, source = "within 15 s", "field reports of far bastions (dstack#2346)"
    remedy = "ssh -v HOST shows where it stops"
    deadline_s = 300.0  # a connection has its own; a person who compares a fingerprint takes longer

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        began = time.monotonic()
        node.open()
        took = time.monotonic() - began
        way = f"in Slurm's job {node.job}" if node.job else seconds_text(took) if node.name else "this machine"
        return judge_login(took, system_facts(node), way=f"a login node; {way}" if node.kind == "login" else way)


def judge_login(took: float, told: dict[str, Any], *, way: str) -> Verdict:
    """How long the login took, and the PATH that commands see there."""
    if told["setup_error"]:
        return fail(told["setup_error"], hint="correct environment.setup in the profile")
    text = f"{way}; Python {told['python']}, {told['arch']}; PATH {told['path']}"
    made = warn if took > SLOW_LOGIN_S else ok
    return made(text, value=took, unit="s")


class Clock(NodeCheck):
    """The node's clock against this machine's."""

    name, tier, title = "clock", "quick", "the clock agrees with this machine's"
    asks = ("host", "login", "job")
    threshold, source = "0.5 s; more than 3 s fails", "petals#433: half a round trip over SSH is taken off"
    remedy = "timedatectl tells there; on WSL and after a VM's sleep: sudo hwclock -s"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return judge_clock(system_facts(node)["offset_s"])


def judge_clock(offset_s: float) -> Verdict:
    """How far the clock surely is off."""
    off = abs(offset_s)
    text = f"{off:.1f} s {'ahead' if offset_s > 0 else 'behind'}" if off >= 0.05 else "agrees"
    made = fail if off > CLOCK_LIMIT_S else warn if off > CLOCK_WARN_S else ok
    return made(text, value=offset_s, unit="s")


class Memory(NodeCheck):
    """RAM against the profile."""

    name, tier, title = "memory", "quick", "processor memory and cores are what the profile says"
    threshold, source = "cpu.memory and cpu.cores of the profile", "the plan reckons with them"
    remedy = "correct cpu.memory or cpu.cores in the profile, or end what uses the memory there"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return judge_memory(system_facts(node), memory=node.site.cpu.memory, cores=node.site.cpu.cores)


def judge_memory(told: dict[str, Any], *, memory: float, cores: int) -> Verdict:
    """What is there, also within a container's limit, against what the profile says."""
    total = min(filter(None, (told["memory_bytes"], told["limit_bytes"])), default=None)
    if total is None:
        return skipped("the system does not tell (/proc/meminfo)")
    free = told["available_bytes"]
    text = f"{memory_text(total)}, {memory_text(free or 0)} of it available, {told['cores']} cores"
    if told["limit_bytes"] and told["limit_bytes"] == total:
        text += " (the session's limit)"
    figures = {"value": total, "unit": "B", "threshold": f"{memory_text(memory)}, {cores} cores"}
    if total < 0.95 * memory or told["cores"] < cores:
        return warn(f"{text}: less than the profile says", **figures)
    if free is not None and free < 0.5 * memory:
        return warn(f"{text}: others use it", **figures)
    return ok(text, **figures)


class Limits(NodeCheck):
    """/dev/shm and ulimits."""

    name, tier, title = "limits", "quick", "/dev/shm, open files, locked memory"
    asks = ("host", "login", "job")  # Slurm has a job take over those of the shell that submits it
    threshold = "/dev/shm ≥ 8 GB on accelerators, 65536 open files, memlock unlimited with RDMA"
    source = "proposed; NCCL and data loaders fail below, with errors that name something else"
    remedy = (
        "ulimit -n 65536; memlock in /etc/security/limits.conf; in a container --shm-size=16g --ulimit memlock=-1"
    )

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return judge_limits(system_facts(node), gpus=node.has_gpus)


def judge_limits(told: dict[str, Any], *, gpus: bool) -> Verdict:
    """Each limit that is too low, by name."""
    shm, nofile, memlock = told["shm_bytes"], told["nofile"], told["memlock"]
    low = []
    if gpus and (shm is None or shm < SHM_BYTES):
        low.append(f"/dev/shm holds {bytes_text(shm) if shm else 'nothing'}")
    if nofile is not None and nofile < NOFILE:
        low.append(f"at most {nofile} open files")
    if memlock is not None and told["rdma"]:
        low.append(f"at most {bytes_text(memlock)} locked, with {listed(told['rdma'])}")
    if low:
        return warn("; ".join(low))
    files = "no limit of" if nofile is None else nofile
    return ok(f"{files} open files, /dev/shm {bytes_text(shm) if shm else 'not there'}")


class Leftovers(NodeCheck):
    """Other runs' processes."""

    name, tier, title = "leftovers", "quick", "no process of another run of islandctl"
    asks = ("host", "login", "job")
    threshold, source = "none", "two runs on one node share its accelerators and its memory"
    remedy = "islandctl runs lists them where they were launched; islandctl stop RUN ends one"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return judge_leftovers(node.ask("leftovers", timeout_s=20.0, mark=node.facts.get("mark", ""))["runs"])


def judge_leftovers(runs: dict[str, list[int]]) -> Verdict:
    """``runs``: mark of a run → its processes."""
    if not runs:
        return ok("none")
    told = [f"{mark.rpartition('.')[0] or mark} (pid {listed(pids, 3)})" for mark, pids in sorted(runs.items())]
    first = next(iter(sorted(runs))).rpartition(".")[0]
    text = f"of {listed(told, 3)}"
    return warn(
        text, value=len(runs), unit="runs", hint=f"islandctl stop {first} where it was launched, if it is not wanted"
    )
