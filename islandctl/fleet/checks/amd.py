"""AMD's accelerators: rocm-smi, or amd-smi where that is all there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from islandctl.fleet.checks.base import Node, NodeCheck, Tool, Verdict, Verdicts, fail, listed, ok, skipped, warn
from islandctl.fleet.checks.smi import first_line, is_amd, no_gpus, untold

HOT_C = 95.0
"""Of the junction; AMD slows an Instinct down at 100."""
IDLE_BYTES = 1e9
_ROCM = ["rocm-smi", "--showproductname", "--showuniqueid", "--showtemp", "--showmeminfo", "vram", "--json"]


class Amd(NodeCheck):
    """Count, heat, memory in use, memory errors."""

    name, tier, title = "amd", "quick", "AMD: all accelerators there, free, cool, without uncorrected memory error"
    threshold = "gpu.per_node, < 1 GB used, ≤ 95 °C, 0 uncorrectable"
    source = "the profile; ROCm's documentation of RAS"
    remedy = "rocm-smi and dmesg there tell more; give the node back"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        no = no_gpus(node)
        if no is not None:
            return no
        if not is_amd(node):
            return skipped("no AMD accelerators by the profile")
        seen, errors = node.tool(_ROCM), node.tool(["rocm-smi", "--showrasinfo", "all"])
        if seen.missing:
            seen = node.tool(["amd-smi", "metric", "--json"])
            errors = seen
        return judge_amd(seen, errors, expected=node.ranks)


def judge_amd(seen: Tool, errors: Tool, *, expected: int) -> Verdict:
    """``seen``: JSON of rocm-smi or of amd-smi; ``errors``: rocm-smi's table of memory errors."""
    if seen.missing:
        return fail(f"neither rocm-smi nor amd-smi is there (PATH {seen.path})")
    no = untold(seen, "rocm-smi")
    if no is not None:
        return no
    cards = list(_cards(seen.out))
    if not cards:
        return fail(first_line(seen.text))
    names = sorted({str(card["name"]) for card in cards if card["name"]})
    text = f"{len(cards)} × {', '.join(names) or 'AMD'}"
    figures: dict[str, Any] = {"value": len(cards), "unit": "accelerators", "threshold": f"{expected}"}
    if len(cards) < expected:
        return fail(f"{text}: the profile says {expected}", **figures)
    wrong = [str(at) for at, card in enumerate(cards) if card["uncorrectable"]]
    wrong += _uncorrectable(errors.out)
    if wrong:
        return fail(f"{text}: uncorrectable memory errors on GPU {listed(sorted(set(wrong)))}", **figures)
    used = [str(at) for at, card in enumerate(cards) if card["used"] > IDLE_BYTES]
    if used:
        return fail(f"{text}: memory in use on GPU {listed(used)}", **figures)
    hottest = max(float(card["degrees"]) for card in cards)
    text += f", up to {hottest:.0f} °C"
    return (warn if hottest > HOT_C else ok)(text, **figures)


def _cards(text: str) -> Iterator[dict[str, Any]]:
    try:
        whole = json.loads(text[min(at for at in (text.find("{"), text.find("[")) if at >= 0) :])
    except ValueError:
        return
    if isinstance(whole, dict) and "gpu_data" in whole:  # amd-smi since ROCm 7
        whole = whole["gpu_data"]
    if isinstance(whole, list):
        yield from (_of_amd_smi(card) for card in whole if isinstance(card, dict) and "gpu" in card)
        return
    for name, card in sorted(whole.items()):
        if re.fullmatch(r"card\d+", name):
            yield _of_rocm_smi(card)


def _of_rocm_smi(card: dict[str, str]) -> dict[str, Any]:
    def first(pattern: str) -> str:
        return next((value for key, value in card.items() if re.search(pattern, key, re.I)), "")

    return {
        "name": first(r"^card series$") or first(r"^card model$"),
        "degrees": _number(first(r"temperature.*junction") or first("temperature")),
        "used": _number(first(r"vram total used")),
        "uncorrectable": 0.0,
    }


def _of_amd_smi(card: dict[str, Any]) -> dict[str, Any]:
    memory, heat, errors = (card.get(key) or {} for key in ("mem_usage", "temperature", "ecc"))
    return {
        "name": "",
        "degrees": _number(heat.get("hotspot")),
        "used": _number(memory.get("used_vram")) * 1e6,
        "uncorrectable": _number(errors.get("total_uncorrectable_count")),
    }


def _number(told: Any) -> float:
    """``41.0``, ``"41.0"`` or ``{"value": 41, "unit": "C"}``; 0 where nothing is told."""
    found = re.match(r"-?\d+(\.\d+)?", str(told.get("value") if isinstance(told, dict) else told))
    return float(found[0]) if found else 0.0


def _uncorrectable(text: str) -> list[str]:
    """Accelerators with a row in the RAS table whose last column is not zero."""
    gpu, found = "?", []
    for line in text.splitlines():
        if head := re.match(r"GPU\[(\d+)\]", line):
            gpu = head[1]
        row = re.match(r"\s*\w+\s+ENABLED\s+\d+\s+(\d+)\s*$", line)
        if row and int(row[1]):
            found.append(gpu)
    return found
