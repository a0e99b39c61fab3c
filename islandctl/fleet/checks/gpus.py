"""NVIDIA accelerators at rest: are all there, whole, and free?"""

from __future__ import annotations

import re

from islandctl.fleet.checks.base import Node, NodeCheck, Tool, Verdict, Verdicts, fail, listed, ok, skipped, warn
from islandctl.fleet.checks.smi import (
    LOST,
    ask_smi,
    first_line,
    is_amd,
    no_gpus,
    number,
    nvidia,
    rows,
    untold,
    untold_table,
    word,
)

CORRECTED = 5e7
IDLE_MIB = 15.0


class GpuCount(NodeCheck):
    """Count, names, UUIDs."""

    name, tier, title = "gpus", "quick", "as many accelerators as the profile says, of its type, none lost"
    threshold, source = "gpu.per_node and gpu.type of the profile", "WatermarkDM#8, modded-nanogpt#61"
    remedy = "dmesg there tells why one is missing; correct gpu.per_node, or give the node back"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = no_gpus(node)
        if no is not None:
            return no
        if is_amd(node):
            return skipped("AMD accelerators: see the check amd")
        tool = ask_smi(node, ["index", "uuid", "name", "driver_version", "pci.bus_id"])
        verdict = judge_count(tool, kind=node.site.gpu.type, expected=node.ranks)
        node.facts["uuids"] = [word(row, "uuid") for row in rows(tool.out)]
        node.facts["driver"] = next((word(row, "driver_version") for row in rows(tool.out)), "")
        return verdict


def judge_count(tool: Tool, *, kind: str, expected: int) -> Verdict:
    """Args: kind: ``gpu.type``; expected: accelerators that the run wants of this node."""
    if tool.missing:
        return fail(
            f"nvidia-smi is not there (PATH {tool.path}), though gpu.type is {kind}",
            hint="install NVIDIA's driver there; or set gpu.type: cpu; or environment.setup to what finds it",
        )
    no = untold(tool, "nvidia-smi")
    if no is not None:
        return no
    table = rows(tool.out)
    lost = [word(row, "index") or str(at) for at, row in enumerate(table) if LOST.search(" ".join(row.values()))]
    figures = {"value": len(table) - len(lost), "unit": "accelerators", "threshold": f"{expected} × {kind}"}
    if lost or LOST.search(tool.text):
        return fail(f"lost: GPU {listed(lost) or first_line(tool.text)}; {len(table) - len(lost)} answer", **figures)
    if not table:
        return fail(first_line(tool.text), **figures)
    names = sorted({word(row, "name") for row in table})
    text = f"{len(table)} × {', '.join(names)}, driver {word(table[0], 'driver_version') or '?'}"
    if len(table) < expected:
        return fail(f"{text}: the profile says {expected}", **figures)
    model = re.split(r"[-_ ]", kind)[0].lower()
    strange = [name for name in names if model not in name.lower().replace(" ", "")]
    if len(names) > 1 or strange:
        return warn(f"{text}: the profile says {kind}", **figures)
    return ok(text, **figures)


class Mig(NodeCheck):
    """No slices."""

    name, tier, title = "mig", "quick", "MIG is off: a rank gets a whole accelerator"
    threshold, source = "no MIG device", "proposed"
    remedy = "sudo nvidia-smi -mig 0, by whoever may; or another node"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return nvidia(node) or judge_mig(node.tool(["nvidia-smi", "-L"]))


def judge_mig(tool: Tool) -> Verdict:
    """``nvidia-smi -L``: slices are lines of their own below their accelerator."""
    no = untold(tool, "nvidia-smi")
    if no is not None:
        return no
    slices = re.findall(r"^\s+MIG .*", tool.out, re.M)
    if slices:
        return fail(f"{len(slices)} MIG devices: {slices[0].strip()}", value=len(slices))
    if not re.search(r"^GPU \d+:", tool.out, re.M):
        return fail(first_line(tool.text))
    return ok("off", value=0)


class Ecc(NodeCheck):
    """Memory errors since the driver was loaded."""

    name, tier, title = "gpu-ecc", "quick", "no uncorrected memory error since the driver was loaded"
    threshold, source = "0 uncorrected; at most 5e7 corrected", "facebookresearch/gcm's defaults"
    remedy = "reset the accelerator or reboot; give the node back if it comes again"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        fields = ["index", "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total"]
        return nvidia(node) or judge_ecc(ask_smi(node, fields))


def judge_ecc(tool: Tool) -> Verdict:
    """Each accelerator's counts; consumer cards have none."""
    no = untold_table(tool)
    if no is not None:
        return no
    bad, many, untold_by, most = [], [], 0, 0.0
    table = rows(tool.out)
    for row in table:
        index = word(row, "index")
        uncorrected = number(row, "ecc.errors.uncorrected.volatile.total")
        corrected = number(row, "ecc.errors.corrected.volatile.total")
        if LOST.search(" ".join(row.values())):
            bad.append(f"GPU {index} is lost")
        elif uncorrected is None:
            untold_by += 1
        elif uncorrected > 0:
            bad.append(f"GPU {index}: {uncorrected:.0f}")
            most = max(most, uncorrected)
        if corrected is not None and corrected > CORRECTED:
            many.append(f"GPU {index}: {corrected:.2g}")
    if bad:
        return fail(f"uncorrected errors: {listed(bad)}", value=most, unit="errors")
    if many:
        return warn(f"corrected errors: {listed(many)}")
    if untold_by == len(table):
        return skipped("these accelerators do not count memory errors (ECC off or not there)")
    return ok(f"none on {len(table) - untold_by} accelerators", value=0, unit="errors")


class RowRemap(NodeCheck):
    """Rows of memory that were or must be replaced."""

    name, tier, title = "gpu-rows", "quick", "no row of memory waits to be replaced, none could not be"
    threshold, source = "0 pending, 0 failed", "facebookresearch/gcm"
    remedy = "pending: reset the accelerator or reboot; failed: give the node back"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        fields = ["gpu_uuid", "remapped_rows.pending", "remapped_rows.failure"]
        return nvidia(node) or judge_rows(ask_smi(node, fields, what="remapped-rows"))


def judge_rows(tool: Tool) -> Verdict:
    """Flags are ``Yes``/``No`` or numbers, by driver."""
    no = untold_table(tool)
    if no is not None:
        return no
    table = rows(tool.out)

    def flagged(name: str) -> list[str]:
        named = [(word(row, "gpu_uuid")[:12], word(row, f"remapped_rows.{name}")) for row in table]
        return [uuid for uuid, said in named if said.lower() not in ("", "no", "0")]

    failed, pending = flagged("failure"), flagged("pending")
    if failed:
        return fail(f"could not be replaced: {listed(failed)}", value=len(failed), unit="accelerators")
    if pending:
        return fail(f"wait for a reset: {listed(pending)}", value=len(pending), unit="accelerators")
    if not any(word(row, "remapped_rows.pending") for row in table):
        return skipped("these accelerators do not replace rows, or their driver does not tell")
    return ok("none", value=0, unit="accelerators")


class GpuFree(NodeCheck):
    """Others on the accelerators."""

    name, tier, title = "gpu-free", "quick", "no process and no left-over memory on the accelerators"
    threshold, source = "no process, at most 15 MiB used", "proposed"
    remedy = "end the process, if it is yours; memory without one: a killed run's, reset the accelerator"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = nvidia(node)
        if no is not None:
            return no
        used = ask_smi(node, ["index", "memory.used", "memory.total"])
        apps = ask_smi(node, ["gpu_uuid", "pid", "process_name", "used_memory"], what="compute-apps")
        return judge_free(used, apps)


def judge_free(used: Tool, apps: Tool) -> Verdict:
    """Memory of each accelerator, and the processes on them. In a container the processes are not all seen."""
    no = untold(used, "nvidia-smi")
    if no is not None:
        return no
    processes = [f"pid {word(row, 'pid')} {word(row, 'process_name')}" for row in rows(apps.out) if word(row, "pid")]
    amounts = {word(row, "index"): number(row, "memory.used") for row in rows(used.out)}
    held = [f"GPU {index}: {mib:.0f} MiB" for index, mib in amounts.items() if mib is not None and mib > IDLE_MIB]
    most = max((mib for mib in amounts.values() if mib is not None), default=0.0)
    if processes:
        return fail(f"in use by {listed(processes, 3)}", value=most, unit="MiB")
    if not held:
        return ok("free", value=most, unit="MiB") if amounts else fail(first_line(used.text))
    # drivers since 535 keep some hundred MiB of a large accelerator for themselves
    if most > 1024:
        return fail(f"memory held without a process: {listed(held)}", value=most, unit="MiB")
    return warn(f"memory held without a process: {listed(held)}", value=most, unit="MiB")
