"""Nodes of one cell with one folder, and without: real folders, reached as nodes are."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.errors import PreflightError
from islandctl.fleet.delivery import Member
from islandctl.fleet.local import LocalHost
from islandctl.runs.folders import demand_one_folder


def members(*folders: Path) -> list[Member]:
    return [Member(LocalHost(f"east/n{index}"), str(folder)) for index, folder in enumerate(folders)]


def test_one_folder_by_several_ways(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "mount").symlink_to(shared)
    demand_one_folder("east", members(shared, tmp_path / "mount", shared))
    demand_one_folder("east", members(tmp_path / "alone"))
    assert not list((shared / "store").iterdir())  # the sign is taken away


def test_a_disk_of_its_own_is_named_before_anything_trains(tmp_path: Path) -> None:
    disks = [tmp_path / name for name in ("a", "b", "c")]
    with pytest.raises(PreflightError) as caught:
        demand_one_folder("east", members(disks[0], disks[0], *disks[1:]))
    assert caught.value.message == (
        f"east/n2: what east/n0 writes into {disks[0]} is not seen here, nor by 1 more: "
        "cell east could keep no checkpoint"
    )
    assert "work_dir" in caught.value.hint
    assert not list((disks[0] / "store").iterdir())
