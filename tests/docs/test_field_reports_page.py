"""Every test that docs/field-reports.md names is there, and every row names one or a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")


def test_every_test_on_the_page_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_every_row_has_its_proof() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "what was seen"]
    assert [row for row in rows if len(row) != 3 or not row[2].strip()] == []
