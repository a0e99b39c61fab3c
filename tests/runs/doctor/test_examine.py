"""What is examined: the recipe's run, or one site of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from islandctl.config.load import load_recipe, load_site
from islandctl.fleet.checks.base import Cell, CellCheck, Node, NodeCheck, Verdicts, ok
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from islandctl.runs.doctor.examine import examine, for_one
from tests.sshd import servers

ROOT = Path(__file__).parents[3]


def test_one_site_of_several_is_examined_by_itself() -> None:
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    first, second = (load_site(ROOT / "site-profiles" / f"local-{name}.yaml") for name in "ab")
    assert for_one(recipe, [first, second]) is recipe
    plan = make_plan(for_one(recipe, [first]), [first])
    assert [cell.site for cell in plan.cells] == [first.value.name]
    assert plan.recipe.relay == recipe.value.relay
    assert Plan.model_validate_json(plan.model_dump_json()) == plan  # as `stop` reads it when doctor was killed


class Seen(CellCheck):
    """Keeps what it is given."""

    name, tier, title, threshold, source, remedy = "seen", "quick", "", "", "", ""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def look(self, cell: Cell) -> Verdicts:
        self.cells.append(cell)
        return ok("seen")


class Asked(NodeCheck):
    """Keeps what the plan asks of each node."""

    name, tier, title, threshold, source, remedy = "asked", "quick", "", "", "", ""

    def __init__(self) -> None:
        self.wanted: list[float | None] = []

    def look(self, node: Node) -> Verdicts:
        self.wanted.append(node.wanted.checkpoint_bytes)
        return ok("asked")


def test_a_site_alone_is_asked_for_room_for_the_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    sites = [load_site(ROOT / "site-profiles" / f"local-{name}.yaml") for name in "ab"]
    whole = make_plan(recipe, sites).estimates[0].checkpoint_bytes.value
    bare = make_plan(for_one(recipe, sites[:1]), sites[:1]).estimates[0].checkpoint_bytes.value
    check = Asked()
    report = examine(recipe, sites[:1], [check], tier="quick", say=print)
    assert [row.level for row in report.rows if row.check == "asked"] == ["ok"]
    assert check.wanted == [whole]
    assert whole > 1.5 * bare


def test_a_cell_of_two_nodes_is_held_against_the_plan_s_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks a node share what the profile tells of one: 2 × 8 Gbit/s, of which the fabric carries a half."""
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    recipe, check = load_recipe(ROOT / "recipes" / "demo.yaml"), Seen()
    data = yaml.safe_load((ROOT / "site-profiles" / "local-a.yaml").read_text())
    data |= {"scheduler": "ssh", "hosts": ["n0", "n1"], "ssh": {"config": str(tmp_path / "config")}}
    data |= {"gpu": {"type": "cpu", "count": 4, "per_node": 2}}
    data |= {"network": {"bandwidth": "8 Gbit/s", "oversubscription": 2}, "work_dir": str(tmp_path / "work")}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(data))
    with servers(tmp_path / "servers") as start:
        (tmp_path / "config").write_text("".join(start().alias(name) for name in ("n0", "n1")))
        examine(recipe, [load_site(tmp_path / "far.yaml")], [check], tier="quick", say=print)
    (cell,) = check.cells
    assert [(node.name, node.ranks) for node in cell.nodes] == [("n0", 2), ("n1", 2)]
    assert cell.bus_bytes_per_s == pytest.approx(1e9)
