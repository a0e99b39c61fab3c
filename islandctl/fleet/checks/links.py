"""What joins accelerators and nodes: NVLink, the fabric manager, PCIe, InfiniBand; and the kernel's complaints."""

from __future__ import annotations

import re

from islandctl.fleet.checks.base import Node, NodeCheck, Tool, Verdict, Verdicts, fail, listed, ok, skipped, warn
from islandctl.fleet.checks.smi import ask_smi, no_gpus, number, nvidia, rows, untold, untold_table, word

LINKS = {"A100": (12, 25.0), "H100": (18, 26.562), "H200": (18, 26.562), "B200": (18, 53.125), "B300": (18, 53.125)}
LINKS |= {"GB200": (18, 53.125), "GB300": (18, 53.125)}
"""NVLinks of an accelerator and GB/s of each, one direction."""
LINK_ERRORS = 5
_XIDS = "48 56-58 62-64 68-77 79-86 88-89 92 94-105 110-120 122-125"
XIDS = {number for part in _XIDS.split() for number in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)}
"""Xid events after which an accelerator is not to be trusted (imbue-ai/cluster-health's list)."""
KERNEL_LINES = r"NVRM: Xid|available PCIe bandwidth, limited by|amdgpu.*(RAS|uncorrectable|ring .* timeout)"
NO_RIGHT = re.compile(r"Operation not permitted|Permission denied|not permitted", re.I)


class Xid(NodeCheck):
    """The kernel's log."""

    name, tier, title = "xid", "quick", "no grave accelerator event in the kernel's log"
    threshold, source = f"none of Xid {_XIDS.replace(' ', ', ')}", "imbue-ai/cluster-health"
    remedy = "79 and 48 mean: give the node back; others: reset the accelerator, and look again"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        return no_gpus(node) or judge_xid(node.tool(["dmesg"], keep=KERNEL_LINES))


def judge_xid(tool: Tool) -> Verdict:
    """``dmesg``; without the right to read it nothing is known."""
    no = no_dmesg(tool)
    if no is not None:
        return no
    seen = [(found[1], int(found[2])) for found in re.finditer(r"NVRM: Xid \(([^)]*)\): (\d+)", tool.out)]
    grave = sorted({f"{xid} on {device}" for device, xid in seen if xid in XIDS})
    amd = re.findall(r"amdgpu.*(?:uncorrectable|ring .* timeout).*", tool.out)
    if grave or amd:
        return fail(f"Xid {listed(grave)}" if grave else amd[0].strip()[:120], value=len(grave) or len(amd))
    others = sorted({xid for _, xid in seen})
    if others:
        return warn(f"only lesser ones: Xid {listed(others)}", value=len(others))
    return ok("none", value=0)


def no_dmesg(tool: Tool) -> Verdict | None:
    """Why the kernel's log cannot be read; None: it can."""
    if tool.missing:
        return skipped("dmesg is not there")
    if NO_RIGHT.search(tool.text):
        return skipped("no right to read the kernel's log (kernel.dmesg_restrict)")
    return untold(tool, "dmesg") or (skipped(tool.err.strip()[:120] or "dmesg failed") if tool.code else None)


class NvLink(NodeCheck):
    """NVLink's state."""

    name, tier, title = "nvlink", "quick", "every NVLink is up, at its full rate"
    threshold = "H100 18 × 26.562 GB/s, B200/B300 18 × 53.125; at most 4 errors on a link"
    source = "NVIDIA health validation; imbue-ai/cluster-health (errors)"
    remedy = "reboot; give the node back if it stays"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = nvidia(node)
        if no is not None:
            return no
        state, errors = node.tool(["nvidia-smi", "nvlink", "-s"]), node.tool(["nvidia-smi", "nvlink", "-e"])
        return judge_nvlink(state, errors, kind=node.site.gpu.type)


def judge_nvlink(state: Tool, errors: Tool, *, kind: str) -> Verdict:
    """Links by accelerator, against what its type has; errors of all of them."""
    no = untold(state, "nvidia-smi")
    if no is not None:
        return no
    gpu, rates, down = "?", dict[str, list[float]](), list[str]()
    for line in state.out.splitlines():
        if found := re.match(r"GPU (\d+):", line):
            gpu = found[1]
        elif found := re.match(r"\s*Link (\d+):\s*(?:([\d.]+) GB/s|<?(inactive|off)>?)", line, re.I):
            if found[2]:
                rates.setdefault(gpu, []).append(float(found[2]))
            else:
                down.append(f"GPU {gpu} link {found[1]}")
    if not rates and not down:
        return skipped("these accelerators have no NVLink")
    num, each = next(
        (known for name, known in sorted(LINKS.items(), key=lambda item: -len(item[0])) if name in kind.upper()),
        (0, 0.0),
    )
    few = [f"GPU {gpu}: {len(up)} of {num}" for gpu, up in rates.items() if len(up) < num]
    slow = [f"GPU {gpu}: {min(up):g} GB/s" for gpu, up in rates.items() if min(up) < 0.99 * each]
    if down or few or slow:
        return fail("; ".join(filter(None, (_part("down", down), _part("missing", few), _part("slow", slow)))))
    counts = [int(found[1]) for found in re.finditer(r"Link \d+: .*Errors?: (\d+)", errors.out)]
    total = sum(len(up) for up in rates.values())
    rate = min(min(up) for up in rates.values())
    text = f"{total} links on {len(rates)} accelerators, {rate:g} GB/s each"
    if max(counts, default=0) >= LINK_ERRORS:
        return warn(f"{text}; up to {max(counts)} errors on a link", value=max(counts), unit="errors")
    return ok(text, value=rate, unit="GB/s")


def _part(what: str, found: list[str]) -> str:
    return f"{what}: {listed(found)}" if found else ""


class FabricManager(NodeCheck):
    """NVSwitch boxes need it."""

    name, tier, title = "fabric-manager", "quick", "NVSwitch machines: the fabric manager runs"
    threshold, source = "active", "imbue-ai/cluster-health"
    remedy = "sudo systemctl start nvidia-fabricmanager, by whoever may; its version must be the driver's"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = nvidia(node)
        if no is not None:
            return no
        switches = node.tool(["ls", "/proc/driver/nvidia-nvswitch/devices"])
        return judge_fabric(switches, node.tool(["systemctl", "is-active", "nvidia-fabricmanager"]))


def judge_fabric(switches: Tool, service: Tool) -> Verdict:
    """Args: switches: a list of the NVSwitches; service: ``systemctl is-active``."""
    if switches.code or not switches.out.strip():
        return skipped("no NVSwitch here")
    said = service.out.strip() or service.err.strip()
    if service.missing or "not been booted with systemd" in said or "connect to bus" in said:
        return skipped("systemd cannot be asked here (a container?)")
    return ok("active") if said == "active" else fail(said or "not active")


class Pcie(NodeCheck):
    """Lanes and generation."""

    name, tier, title = "pcie", "quick", "every accelerator has all its PCIe lanes"
    threshold, source = (
        "all the width that it could have; no slot holds it back",
        "ml-engineering, cluster-health",
    )
    remedy = "give the node back: reseating the board is the provider's work"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = nvidia(node)
        if no is not None:
            return no
        fields = [f"pcie.link.{what}.{when}" for what in ("gen", "width") for when in ("current", "max")]
        return judge_pcie(ask_smi(node, ["index", *fields]), node.tool(["dmesg"], keep=KERNEL_LINES))


def judge_pcie(tool: Tool, kernel: Tool) -> Verdict:
    """A generation falls at rest to save power, so only its width is judged; the kernel tells of devices that are
    held back by a slot."""
    no = untold_table(tool)
    if no is not None:
        return no
    narrow, widths = [], set()
    for row in rows(tool.out):
        now, most = number(row, "pcie.link.width.current"), number(row, "pcie.link.width.max")
        if now is None or most is None:
            continue
        widths.add(int(now))
        if now < most:
            narrow.append(f"GPU {word(row, 'index')}: {now:.0f} of {most:.0f} lanes")
    held = re.findall(r"(\S+): \d[\d.]* Gb/s available PCIe bandwidth, limited by", kernel.out)
    if narrow or held:
        return fail("; ".join(filter(None, (_part("narrow", narrow), _part("held back by its slot", held)))))
    if not widths:
        return skipped("the driver does not tell (a virtual machine?)")
    return ok(f"×{max(widths)}", value=min(widths), unit="lanes")


class InfiniBand(NodeCheck):
    """Ports."""

    name, tier, title = "infiniband", "quick", "all InfiniBand ports are active"
    threshold, source = "every port Active and LinkUp, at one rate", "imbue-ai/cluster-health"
    remedy = "look at cable and subnet manager (ibdiagnet); NCCL falls back to TCP in silence otherwise"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        devices = node.tool(["ls", "/sys/class/infiniband"])
        if devices.code or not devices.out.strip():
            return skipped("no RDMA device here")
        return judge_infiniband(node.tool(["ibstat"]))


def judge_infiniband(tool: Tool) -> Verdict:
    """``ibstat``."""
    no = untold(tool, "ibstat")
    if no is not None:
        return no
    adapter, ports, bad, rates = "?", 0, [], set()
    for block in re.split(r"^(?=CA ')|^(?=\s+Port \d+:)", tool.out, flags=re.M):
        if found := re.match(r"CA '([^']+)'", block):
            adapter = found[1]
        elif found := re.match(r"\s+Port (\d+):", block):
            told = dict(re.findall(r"^\s+([A-Z][A-Za-z ]+): *(.*?)\s*$", block, re.M))
            ports += 1
            if (told.get("State"), told.get("Physical state")) != ("Active", "LinkUp"):
                bad.append(f"{adapter} port {found[1]} {told.get('State')}/{told.get('Physical state')}")
            else:
                rates.add(int(told.get("Rate", "0")))
    if bad:
        return fail(f"not up: {listed(bad)} ({ports} ports)", value=len(bad), unit="ports")
    if not ports:
        return skipped(tool.text.strip().splitlines()[0][:120] if tool.text.strip() else "ibstat lists no port")
    text = f"{ports} ports up, {'/'.join(map(str, sorted(rates)))} Gbit/s"
    return (warn if len(rates) > 1 else ok)(text, value=min(rates), unit="Gbit/s")
