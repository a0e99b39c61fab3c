"""Recipes and profiles for the planner's tests, written to files and loaded as a user's are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from islandctl.config.load import Loaded, load_recipe, load_site
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile

Recipes: TypeAlias = Callable[..., Loaded[Recipe]]
Sites: TypeAlias = Callable[..., Loaded[SiteProfile]]

ROOT = Path(__file__).parents[2]


def _changed(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``data`` with ``changes``: ``{"exchange.window": 5}``."""
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = data
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return data


def _recipe(folder: Path, **changes: Any) -> Loaded[Recipe]:
    """A small MoE recipe; keyword ``exchange__window=5`` sets ``exchange.window``."""
    data: dict[str, Any] = {
        "name": "r",
        "model": {
            "kind": "moe",
            "layers": 4,
            "width": 16,
            "heads": 4,
            "kv_heads": 2,
            "hidden": 8,
            "experts": 4,
            "active_experts": 2,
        },
        "data": {"paths": ["python-stdlib"]},
        "training": {"steps": 100, "batch": 16, "sequence": 32, "optimizer": {"lr": 1e-3}},
        "relay": {"address": "relay.example"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(_changed(data, _dotted(changes))))
    return load_recipe(path)


def _site(folder: Path, name: str = "a", **changes: Any) -> Loaded[SiteProfile]:
    """An ssh site of 2 × 8 H100; keyword ``gpu__count=8`` sets ``gpu.count``."""
    data: dict[str, Any] = {
        "name": name,
        "scheduler": "ssh",
        "hosts": [f"{name}-0", f"{name}-1"],
        "gpu": {"type": "H100-SXM", "count": 16, "per_node": 8},
        "cpu": {"cores": 8, "memory": "512 GiB"},
        "network": {"bandwidth": "400 Gbit/s"},
        "wan": {"up": "8 Gbit/s", "down": "8 Gbit/s", "rtt": "100 ms"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(_changed(data, _dotted(changes))))
    return load_site(path)


def _shipped(recipe_name: str, *site_names: str) -> tuple[Loaded[Recipe], list[Loaded[SiteProfile]]]:
    """Files of ``recipes/`` and ``site-profiles/``."""
    sites = [load_site(ROOT / "site-profiles" / f"{name}.yaml") for name in site_names]
    return load_recipe(ROOT / "recipes" / f"{recipe_name}.yaml"), sites


def _dotted(changes: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipes:
    """``recipe(exchange__window=5)``."""
    return lambda **changes: _recipe(tmp_path, **changes)


@pytest.fixture
def site(tmp_path: Path) -> Sites:
    """``site("b", gpu__count=8)``."""
    return lambda name="a", **changes: _site(tmp_path, name, **changes)


@pytest.fixture
def shipped() -> Callable[..., tuple[Loaded[Recipe], list[Loaded[SiteProfile]]]]:
    """``shipped("demo", "local-a", "local-b")``."""
    return _shipped
