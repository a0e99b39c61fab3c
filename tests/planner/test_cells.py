"""Who runs where, and the numbers of cells that are possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from islandctl.config.load import Loaded
from islandctl.errors import ConfigError
from islandctl.planner.cells import make_cells


def test_one_cell_a_site(recipe: Any, site: Any) -> None:
    first, second = make_cells(recipe(), [site("b"), site("a", gpu__count=8, hosts=["x@[::1]:22"])])
    assert (first.index, first.name, first.num_ranks) == (0, "b", 16)
    assert [(node.index, node.host, node.num_ranks) for node in first.nodes] == [(0, "b-0", 8), (1, "b-1", 8)]
    assert (second.index, second.name, second.site) == (1, "a", "a")
    assert [node.host for node in second.nodes] == ["x@[::1]:22"]


def test_a_local_site_has_no_host(shipped: Any) -> None:
    loaded, sites = shipped("demo", "local-a", "local-b")
    assert [cell.nodes[0].host for cell in make_cells(loaded, sites)] == ["", ""]


@pytest.mark.parametrize(
    ("num", "hosts"),
    [(2, [["a-0"], ["a-1"]]), (4, [["a-0"], ["a-0"], ["a-1"], ["a-1"]])],
)
def test_several_cells_share_a_site(recipe: Any, site: Any, num: int, hosts: list[list[str]]) -> None:
    cells = make_cells(recipe(exchange__cells=num, exchange__mode="butterfly"), [site()])
    assert [cell.name for cell in cells] == [f"a-{number}" for number in range(num)]
    assert [[node.host for node in cell.nodes] for cell in cells] == hosts
    assert {cell.num_ranks for cell in cells} == {16 // num}


def test_the_shipped_butterfly(shipped: Any) -> None:
    cells = make_cells(*shipped("butterfly-8", "butterfly-gb300"))
    assert [cell.num_ranks for cell in cells] == [8] * 8
    assert {len(cell.nodes) for cell in cells} == {2}


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ([], {}, "no site given"),
        (["a"], {}, "mode two-site needs at least two cells"),
        (["a", "b"], {"exchange__mode": "none"}, "mode none trains one cell on one site"),
        (["a"], {"exchange__mode": "none", "exchange__cells": 2}, "here are 2 cells on 1 sites"),
        (["a", "b", "c"], {"exchange__mode": "butterfly"}, "not 3; nearest: 2 or 4"),
        (["a"], {"exchange__mode": "butterfly"}, "not 1; nearest: 2"),
        (["a"], {"exchange__mode": "butterfly", "exchange__cells": 12}, "not 12; nearest: 8 or 16"),
        (["a", "b"], {"exchange__cells": 3}, "3 cells cannot be spread evenly over 2 sites"),
        (["a"], {"exchange__cells": 3}, "16 accelerators in nodes of 8 cannot be shared evenly by 3 cells"),
        (["a"], {"exchange__cells": 32}, "cannot be shared evenly by 32 cells"),
        (["a", "b"], {"training__batch": 20}, "training.batch: 20 sequences cannot be shared evenly by the 16 ranks"),
        (["a", "b"], {"training__batch": 20}, "of cell a; nearest: 16 or 32"),
        (["a", "b"], {"training__batch": 3}, "nearest: 16"),
    ],
)
def test_what_cannot_be(recipe: Any, site: Any, names: list[str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_cells(recipe(**changes), [site(name) for name in names])
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("names", "cells", "hint"),
    [
        ("abc", None, "give 2 or 4 sites"),
        ("abc", 8, "give 2 or 4 sites"),
        ("ab", 6, "set exchange.cells: 4"),
        ("abcd", 2, "set exchange.cells: 4"),
        ("a", None, "set exchange.cells: 2"),
    ],
)
def test_a_butterfly_s_hint_is_possible(recipe: Any, site: Any, names: str, cells: int | None, hint: str) -> None:
    loaded = recipe(exchange__mode="butterfly", **({} if cells is None else {"exchange__cells": cells}))
    with pytest.raises(ConfigError) as caught:
        make_cells(loaded, [site(name) for name in names])
    assert hint in caught.value.hint


def test_two_sites_of_one_name_are_shown_with_both_places(recipe: Any, site: Any, tmp_path: Path) -> None:
    first, other = site("a"), site("b")
    again = Loaded(other.value.model_copy(update={"name": "a"}), other.path, other.text_hash, other.places)
    with pytest.raises(ConfigError) as caught:
        make_cells(recipe(), [first, again])
    assert "site name 'a' is taken by" in str(caught.value)
    assert str(caught.value).count(str(tmp_path)) == 2


def test_a_long_site_name_cannot_be_numbered(recipe: Any, site: Any) -> None:
    with pytest.raises(ConfigError, match="too long to number its cells"):
        make_cells(recipe(exchange__cells=2), [site("a" * 42, hosts=["x", "y"])])
