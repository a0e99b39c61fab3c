"""Before workers start: does every node hold the text, is there enough of it, and is it the same everywhere?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from islandctl.config.units import bytes_text
from islandctl.errors import PreflightError
from islandctl.fleet.host import Host
from islandctl.fleet.node_setup import with_setup
from islandctl.fleet.provision import Prepared
from islandctl.planner.plan import Plan
from islandctl.runs.reach import Reach, Say, demand, each

TIMEOUT_S = 1800.0
"""Gigabytes from a shared file system take their time; the workers find them in its cache afterwards."""

_PREFLIGHT = """
import runpy, sys
sys.path.insert(0, sys.argv.pop())
runpy.run_module("islandctl.worker.preflight", run_name="__main__")
"""


def check_text(plan: Plan, prepared: Mapping[tuple[str, str], Prepared], reach: Reach, say: Say) -> None:
    """Have every node read the text as its workers will. A script that brings its own data is not asked.

    Args:
        prepared: by (site, host).

    Raises:
        PreflightError: a node lacks it or has too little of it, or the held-out parts differ.
        UnreachableError: a node does not answer.
    """
    if plan.recipe.data is None:
        return
    asked = {
        "data": plan.recipe.data.model_dump(mode="json"),
        "sequence": plan.recipe.training.sequence,
        "num_cells": len(plan.cells),
    }

    def ask(place: tuple[str, str]) -> tuple[str, str]:
        host = reach.host(*place)
        told = _look(host, prepared[place], plan.site(place[0]).environment.setup, asked)
        say(f"{host.label}: its text is there: {told['files']} files, {bytes_text(told['bytes'])}")
        return host.label, str(told["held_out"])

    seen = demand(each(list(prepared), ask), "reading the text")
    if len({held_out for _, held_out in seen}) > 1:
        first, other = seen[0], next(one for one in seen if one[1] != seen[0][1])
        raise PreflightError(
            f"data.paths: the held-out text of {other[0]} is not that of {first[0]} (hash {other[1][:12]} instead of "
            f"{first[1][:12]})",
            hint="put the same files on every site; python-stdlib also wants the same Python version",
        )


def _look(host: Host, made: Prepared, setup: tuple[str, ...], asked: dict[str, Any]) -> dict[str, Any]:
    argv = [made.python, "-B", "-P", "-c", _PREFLIGHT, made.code]
    done = host.run(with_setup(list(setup), argv), stdin=json.dumps(asked).encode(), timeout_s=TIMEOUT_S)
    try:
        told: dict[str, Any] = json.loads(done.stdout.rstrip().rpartition(b"\n")[2])
    except ValueError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        raise PreflightError(
            f"{host.label}: the text could not be read: {lines[-1]}",
            hint="is there enough memory? the text is held in it as a whole; data.limit_bytes takes less",
        ) from None
    if "error" in told:
        raise PreflightError(f"{host.label}: {told['error']}", hint=told["hint"])
    return told
