"""Published figures that the planner is held against: ``data/`` says where each comes from."""

from __future__ import annotations

import csv
import math
from pathlib import Path

DATA = Path(__file__).parent / "data"
SHARES = {"u50": 0.5, "u80": 0.8, "u90": 0.9, "u95": 0.95, "u99": 0.99}
GRID_GBIT = [10 ** (-1 + 4 * number / 49) for number in range(50)]
"""The source's bandwidths."""


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table in ``data/``; its comments are left out."""
    text = (DATA / name).read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


def notches(got_gbit: float, published_gbit: float) -> int:
    """Steps of the source's grid between two bandwidths; negative: the planner is the more optimistic one."""
    return round(math.log(got_gbit / published_gbit) / math.log(GRID_GBIT[1] / GRID_GBIT[0]))
