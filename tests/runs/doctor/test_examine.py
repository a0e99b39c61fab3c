"""What is examined: the recipe's run, or one site of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from islandctl.config.load import Loaded, load_recipe, load_site
from islandctl.config.site import SiteProfile
from islandctl.errors import UnreachableError
from islandctl.fleet.checks.base import Cell, CellCheck, Node, NodeCheck, Verdict, Verdicts, ok
from islandctl.fleet.checks.disk import OneFolder
from islandctl.fleet.checks.wan import RelayReach
from islandctl.fleet.local import LocalHost
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from islandctl.runs import network
from islandctl.runs.doctor.examine import examine, for_one
from islandctl.runs.reach import Reach
from islandctl.runs.record import RunRecord, TunnelRecord
from tests.runs import builders as make
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


def far_site(tmp_path: Path, **more: Any) -> Loaded[SiteProfile]:
    """A site of two hosts, n0 and n1, with two ranks each."""
    data = yaml.safe_load((ROOT / "site-profiles" / "local-a.yaml").read_text())
    data |= {"scheduler": "ssh", "hosts": ["n0", "n1"], "ssh": {"config": str(tmp_path / "config")}}
    data |= {"gpu": {"type": "cpu", "count": 4, "per_node": 2}, "work_dir": str(tmp_path / "work"), **more}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(data))
    return load_site(tmp_path / "far.yaml")


def test_a_cell_of_two_nodes_is_held_against_the_plan_s_own_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks a node share what the profile tells of one: 2 × 8 Gbit/s, of which the fabric carries a half."""
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    recipe, check = load_recipe(ROOT / "recipes" / "demo.yaml"), Seen()
    site = far_site(tmp_path, network={"bandwidth": "8 Gbit/s", "oversubscription": 2})
    with servers(tmp_path / "servers") as start:
        (tmp_path / "config").write_text("".join(start().alias(name) for name in ("n0", "n1")))
        examine(recipe, [site], [check], tier="quick", say=print)
    (cell,) = check.cells
    assert [(node.name, node.ranks) for node in cell.nodes] == [("n0", 2), ("n1", 2)]
    assert cell.bus_bytes_per_s == pytest.approx(1e9)


def test_a_node_whose_tunnel_cannot_be_opened_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    recipe, site, begin = load_recipe(ROOT / "recipes" / "demo.yaml"), far_site(tmp_path), network._start_tunnel

    def opened(record: RunRecord, reach: Reach, way: TunnelRecord) -> None:
        if way.host == "n0":
            raise UnreachableError("far/n0: link lost", hint="look at the link")
        begin(record, reach, way)

    monkeypatch.setattr(network, "_start_tunnel", opened)
    with servers(tmp_path / "servers") as start:
        (tmp_path / "config").write_text("".join(start().alias(name) for name in ("n0", "n1")))
        report = examine(recipe, [site], [RelayReach()], tier="quick", say=print)
    name = site.value.name
    lost, found = (row for row in report.rows if row.check == "relay")
    assert (lost.place, lost.level, lost.text) == (f"{name}/n0", "unknown", "far/n0: link lost")
    assert (found.place, found.level in ("ok", "warn")) == (name, True), found
    assert found.text.startswith("1 node, round trip")


def test_nodes_of_a_cell_without_a_folder_in_common_are_told_before_a_launch_is_refused(tmp_path: Path) -> None:
    def cell(*folders: Path) -> Cell:
        data = {"scheduler": "ssh", "hosts": [f"n{at}" for at in range(len(folders))]}
        return Cell("far", tuple(node(at, folder, data) for at, folder in enumerate(folders)))

    def node(at: int, folder: Path, data: dict[str, Any]) -> Node:
        site = make.site("far").model_copy(update={**data, "work_dir": str(folder)})
        return Node(site, f"n{at}", 1, open=lambda: LocalHost(f"far/n{at}"))

    (tmp_path / "mount").symlink_to(tmp_path / "a")
    told = OneFolder().look(cell(tmp_path / "a", tmp_path / "mount"))
    assert isinstance(told, Verdict)
    assert (told.level, told.text) == ("ok", f"what far/n0 writes into {tmp_path / 'a'} is seen on all others")
    told = OneFolder().look(cell(tmp_path / "a", tmp_path / "mount", tmp_path / "b"))
    assert isinstance(told, Verdict)
    assert (told.level, told.text) == ("fail", f"what far/n0 writes into {tmp_path / 'a'} is not seen on far/n2")
    assert not list((tmp_path / "a" / "store").iterdir())
