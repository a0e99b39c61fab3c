"""A saved plan: to text and back."""

from __future__ import annotations

import json
import os

from pydantic import ValidationError

from islandctl.config.beside import read_bytes
from islandctl.config.load import text_hash
from islandctl.errors import ConfigError
from islandctl.planner.plan import PLAN_VERSION, Plan

MAX_PLAN_BYTES = 64 << 20


def plan_text(plan: Plan) -> str:
    """The plan as it is saved: readable JSON, with its own hash against damage."""
    return json.dumps({"plan_hash": plan.plan_hash, "plan": plan.model_dump(mode="json")}, indent=1) + "\n"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a saved plan.

    Raises:
        ConfigError: not there, not a plan, of another version, or changed since it was saved.
    """
    name = os.fspath(path)
    again = f"make it again: islandctl plan RECIPE --site PROFILE --out {name}"
    content = read_bytes(path, max_bytes=MAX_PLAN_BYTES, hint=again)
    try:
        saved = json.loads(content)
        version, plan_hash = saved["plan"]["version"], saved["plan_hash"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name}: not a plan, or damaged", hint=again) from error
    if version != PLAN_VERSION:
        raise ConfigError(f"{name}: a plan of version {version}; this islandctl reads {PLAN_VERSION}", hint=again)
    try:
        plan = Plan.model_validate(saved["plan"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: damaged plan: {place}: {first['msg']}", hint=again) from error
    if plan.plan_hash != plan_hash:
        raise ConfigError(f"{name}: the plan was changed after it was saved", hint=again)
    return plan


def looks_like_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a file is meant as a saved plan rather than a recipe (which may be JSON too: JSON is YAML)."""
    try:
        with open(path, "rb") as file:
            start = file.read(256).lstrip()
            return start.startswith(b"{") and b'"plan_hash"' in start
    except OSError:
        return False


def is_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a whole saved plan. (A recipe may be written as JSON, too.)"""
    try:
        return looks_like_plan(path) and bool(load_plan(path).plan_hash)
    except ConfigError:
        return False


def changed_sources(plan: Plan) -> list[str]:
    """The profiles and recipe that are no longer what the plan was made from (changed, gone or unreadable)."""
    return [path for path, known in plan.sources.items() if text_hash(path) != known]
