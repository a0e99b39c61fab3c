"""Tables on narrow terminals: whatever is cut off elsewhere, no figure is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from islandctl.cli.plan_view import gathered
from islandctl.cli.tables import plain_table, print_table
from islandctl.planner.plan import Finding


@pytest.mark.parametrize("width", [100, 60, 40, 12])
def test_every_cell_is_there_whole_whatever_the_width(width: int) -> None:
    table = plain_table("cell", "memory a rank", "step", "link")
    names = ["us-b300-0 … (4)", "asia-gb300-0 … (4)"]
    for name in names:
        table.add_row(name, "98563–162799 / 268 GiB", "411 s–10.2 min", "178%", style="bold")
    out = io.StringIO()
    print_table(Console(file=out, width=width, color_system=None), table)
    text = out.getvalue()
    assert "…" not in text.replace(" … (4)", "")
    for cell in (*names, "98563–162799 / 268 GiB", "411 s–10.2 min", "178%"):
        assert text.count(cell) >= 1 + (cell not in names)
    if width >= 60:
        assert max(len(line) for line in text.splitlines()) <= width


def test_of_many_findings_that_differ_in_their_figures_the_worst_is_shown() -> None:
    def finding(number: int, place: str) -> Finding:
        return Finding(level="fail", place=place, text=f"needs {number}.5 s of a window of 50 steps", hint="x")

    many = [finding(number, f"s{number}") for number in range(65)]
    other = Finding(level="fail", place="s3", text="memory of a rank: needs 3 GiB", hint="y")
    shown = gathered([*many, other], "s17")
    assert [one.text for one in shown] == [many[17].text, other.text]
    assert shown[0].place.startswith("s17, and 64 more like it")
    assert gathered(many[:3], "s1") == many[:3]
