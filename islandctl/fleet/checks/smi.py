"""nvidia-smi's tables (``--query-…=… --format=csv``) as rows: text in, values out.

Header and values carry units (``memory.used [MiB]``, ``12 MiB``), which are taken off. What a driver cannot tell is
``[N/A]`` or ``[Not Supported]``; a device that has fallen off the bus says so where its values would be.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

from islandctl.fleet.checks.base import Node, Tool, Verdict, skipped, unknown

Row = Mapping[str, str]

LOST = re.compile(
    r"GPU is lost|GPU requires reset|Unknown Error|fallen off the bus|Unable to determine the device", re.I
)
NOT_TOLD = re.compile(r"\[?(N/A|Not Supported|Unknown|Insufficient Permissions|Function Not Found)\]?", re.I)
ALIASES = {
    f"clocks_event_reasons.{name}": f"clocks_throttle_reasons.{name}"
    for name in (
        "active",
        "hw_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sw_thermal_slowdown",
        "sw_power_cap",
    )
}
"""Names that drivers before 535 use."""


def rows(text: str) -> list[dict[str, str]]:
    """The table's rows by column; a line that is no row of it (a warning, an error) is left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((at for at, line in enumerate(lines) if re.match(r"[a-z_]+(\.[a-z_.]+)?( \[|,|$)", line)), None)
    if start is None:
        return []
    table = list(csv.reader(lines[start:], skipinitialspace=True))
    names = [canonical(name) for name in table[0]]
    return [dict(zip(names, row, strict=True)) for row in table[1:] if len(row) == len(names)]


def canonical(name: str) -> str:
    """A column's name without its unit, as present drivers call it."""
    bare = name.split(" [")[0].strip()
    return bare.replace("clocks_throttle_reasons.", "clocks_event_reasons.")


def number(row: Row, name: str) -> float | None:
    """A column's number without its unit; None: this device or driver does not tell."""
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", row.get(name, ""))
    return float(found[1]) if found else None


def word(row: Row, name: str) -> str:
    """A column's text; empty: not told."""
    value = row.get(name, "").strip()
    return "" if NOT_TOLD.fullmatch(value) else value


def ask_smi(node: Node, fields: Sequence[str], *, what: str = "gpu") -> Tool:
    """Run a query; names of older drivers are tried where the present ones are refused."""
    return node.tool(["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv"], aliases=ALIASES)


def nvidia(node: Node) -> Verdict | None:
    """Why nothing can be asked of NVIDIA's tools here; None: it can."""
    no = no_gpus(node)
    if no is None and is_amd(node):
        return skipped("AMD accelerators: rocm-smi is asked")
    return no


def no_gpus(node: Node) -> Verdict | None:
    """Why there are no accelerators here; None: there are, by the profile."""
    if not node.has_gpus:
        return skipped("no accelerator here (gpu.type: cpu)")
    return None


def is_amd(node: Node) -> bool:
    """By the profile's name of the accelerator."""
    return node.site.gpu.type.upper().startswith(("MI", "INSTINCT", "RADEON"))


def untold(tool: Tool, name: str) -> Verdict | None:
    """The verdict where a tool gave no answer; None: it did."""
    if tool.late:
        return unknown(f"{name} did not end: a driver that hangs, most often", hint=f"type there: {name}")
    if tool.missing:
        return skipped(f"{name} is not there (PATH {tool.path})")
    if re.search(r"couldn't communicate with the NVIDIA driver|Driver/library version mismatch", tool.text):
        return Verdict("fail", first_line(tool.text), hint="load or update the driver; after an update: reboot")
    return None


def untold_table(tool: Tool) -> Verdict | None:
    """The same for a query of which at least one row is wanted."""
    no = untold(tool, "nvidia-smi")
    if no is not None or rows(tool.out):
        return no
    return skipped(f"nvidia-smi: {first_line(tool.text)}")


def first_line(text: str) -> str:
    """The first line that is not empty, for messages."""
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "no output")
