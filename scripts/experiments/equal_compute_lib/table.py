"""Writes docs/results: the table between its two marks, the plot, and the figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.experiments.equal_compute_lib.arms import Arm
from scripts.experiments.equal_compute_lib.cache import Cache, commit
from scripts.experiments.equal_compute_lib.plot import plot
from scripts.experiments.equal_compute_lib.report import Figure, Row, ratio, row_of

BEGIN, END = "<!-- table -->", "<!-- /table -->"
COMMAND = "scripts/experiments/equal_compute run"
TARGETS = {
    "two_site_ratio": "long-two-site",
    "butterfly_ratio": "long-butterfly",
    "two_site_ratio_short_training": "two-site-shampoo",
    "two_site_ratio_short_training_short_window": "two-site-short",
    "butterfly_ratio_short_training": "butterfly",
}


def write(arms: Sequence[Arm], cache: Cache, folder: Path) -> None:
    """Write everything that ``cache`` holds of the arms."""
    rows = {arm.name: row for arm in arms if (row := row_of(arm, cache)) is not None}
    ratios = {
        name: found
        for name, row in rows.items()
        if row.arm.against in rows and (found := ratio(row, rows[row.arm.against])) is not None
    }
    page = folder / "equal_compute.md"
    page.write_text(_between_marks(page.read_text() if page.exists() else "", _table(arms, rows, ratios)))
    plot(rows, ratios, folder / "equal_compute.png")
    (folder / "equal_compute.json").write_text(json.dumps(_figures(arms, rows, ratios), indent=1) + "\n")


def _between_marks(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after or chr(10)}"


def _table(arms: Sequence[Arm], rows: dict[str, Row], ratios: dict[str, Figure]) -> str:
    lines = [
        "| arm | bits per byte | against | ratio | rate | MB sent per cell: joint + exchange | command: `… run` |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        name, row = arm.name, rows.get(arm.name)
        if row is None:
            lines.append(f"| {arm.title} | not trained yet | {arm.against or ''} | | | | `{name}` |")
            continue
        joint, exchange = row.mean("bytes_joint_per_cell") / 1e6, row.mean("bytes_up_per_cell") / 1e6
        lines.append(
            f"| {arm.title} | {row.bits_per_byte} | {arm.against or ''} | {ratios.get(name) or ''} "
            f"| {row.rate:g}{'' if row.is_whole else ' (unfinished)'} | {joint:.1f} + {exchange:.2f} | `{name}` |"
        )
    return "\n".join(lines)


def _figures(arms: Sequence[Arm], rows: dict[str, Row], ratios: dict[str, Figure]) -> dict[str, Any]:
    told: dict[str, Any] = dict.fromkeys(TARGETS)
    for key, name in TARGETS.items():
        found = ratios.get(name)
        told[key] = None if found is None else found.told()
    told["commit"] = commit()
    told["cpu_hours"] = sum(row.cpu_s for row in rows.values()) / 3600
    told["not_trained_yet"] = [arm.name for arm in arms if arm.name not in rows]
    told["arms"] = {
        name: {
            "title": row.arm.title,
            "settings": next(row.arm.runs(row.rate)).told(),
            "against": row.arm.against,
            "rate": row.rate,
            "is_whole": row.is_whole,
            "bits_per_byte": row.bits_per_byte.told(),
            "ratio": None if (found := ratios.get(name)) is None else found.told(),
            "by_rate": {f"{rate:g}": figure.told() for rate, figure in row.by_rate.items()},
            "bytes_joint_per_cell": row.mean("bytes_joint_per_cell"),
            "bytes_up_per_cell": row.mean("bytes_up_per_cell"),
            "command": f"{COMMAND} {name}",
        }
        for name, row in rows.items()
    }
    return told
