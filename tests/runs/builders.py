"""Plans, records and facts for tests, as plain data."""

from __future__ import annotations

from typing import Any

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.fleet.job import SupervisorState
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, NodePlan, Plan, Totals, config_hash
from islandctl.relay.messages import CellStatus, Heartbeat, JointCheckpoint, RelayStatus
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.status import Facts, NodeFacts

CELLS = ("east", "west")


def recipe(**training: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"kind": "dense", "layers": 1, "width": 16, "heads": 2, "hidden": 32},
            "data": {"paths": ["python-stdlib"]},
            "training": {"steps": 100, "batch": 4, "sequence": 25, "optimizer": {"lr": 1e-3}, **training},
        }
    )


def site(name: str) -> SiteProfile:
    return SiteProfile.model_validate(
        {
            "name": name,
            "scheduler": "local",
            "gpu": {"type": "cpu", "count": 1, "per_node": 1},
            "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "1 ms"},
            "cpu": {"cores": 1, "memory": "1 GiB"},
        }
    )


def figure(value: float, unit: str = "s") -> Figure:
    return Figure(value=value, low=value, high=value, unit=unit, formula="given")


def plan(**training: Any) -> Plan:
    made = recipe(**training)
    cells = tuple(
        CellPlan(index=index, name=name, site=name, nodes=(NodePlan(index=0, host="", num_ranks=1),))
        for index, name in enumerate(CELLS)
    )
    return Plan(
        recipe=made,
        sites=tuple(site(name) for name in CELLS),
        cells=cells,
        config_hash=config_hash(made, cells),
        sources={},
        parameters_total=1000,
        parameters_active=1000,
        estimates=tuple(
            CellEstimate(
                cell=name,
                memory_per_rank=figure(1e6, "B"),
                bytes_up_per_window=figure(1e6, "B"),
                bytes_down_per_window=figure(1e6, "B"),
                exchange=figure(1.0),
                checkpoint_bytes=figure(1e6, "B"),
                checkpoint_write=figure(1.0),
            )
            for name in CELLS
        ),
        totals=Totals(tokens=1000),
        feasible=True,
    )


def record(**changes: Any) -> RunRecord:
    cells = tuple(
        CellRecord(
            index=index,
            name=name,
            site=name,
            nodes=(
                NodeRecord(
                    cell=index,
                    index=0,
                    site=name,
                    host="",
                    num_ranks=1,
                    python="/env/bin/python",
                    code="/code",
                    supervisor="/code/islandctl/fleet/supervisor.py",
                    work_dir="/data",
                    cell_folder=f"/data/runs/demo/{name}",
                    folder=f"/data/runs/demo/{name}/node-0",
                ),
            ),
        )
        for index, name in enumerate(CELLS)
    )
    fields: dict[str, Any] = {
        "run": "demo",
        "mark": "demo.0123",
        "created": "2030-01-31T12:00:00Z",
        "plan_hash": "p",
        "config_hash": "c",
        "steps": 100,
        "tokens_per_step": 100,
        "phase": "launched",
        "cells": cells,
    }
    return RunRecord.model_validate({**fields, **changes})


def heartbeat(cell: int, **changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "attempt": 1,
        "cell": cell,
        "state": "training",
        "step": 40,
        "steps": 100,
        "tokens": 4000,
        "tokens_per_s": 200.0,
        "bits_per_byte": [(0, 8.0), (20, 5.0), (40, 3.5)],
        "rounds_applied": 3,
    }
    return Heartbeat.model_validate({**fields, **changes})


def relay(
    beats: dict[int, Heartbeat] | None = None, age_s: float = 1.0, still_s: float = 1.0, **changes: Any
) -> RelayStatus:
    known = {0: heartbeat(0), 1: heartbeat(1)} if beats is None else beats
    fields: dict[str, Any] = {
        "run": "demo",
        "config_hash": "c",
        "attempt": 1,
        "ledger_seq": 9,
        "ledger_hash": "h",
        "cells": tuple(
            CellStatus(
                cell=cell,
                name=name,
                heartbeat=known.get(cell),
                age_s=age_s if cell in known else None,
                still_s=still_s if cell in known else None,
            )
            for cell, name in enumerate(CELLS)
        ),
        "rounds_committed": 3,
    }
    return RelayStatus.model_validate({**fields, **changes})


def running(**changes: Any) -> SupervisorState:
    return SupervisorState.model_validate({"state": "running", "child_pid": 1, **changes})


def ended(outcome: str, **changes: Any) -> SupervisorState:
    return SupervisorState.model_validate({"state": "ended", "outcome": outcome, **changes})


def node(cell: int, state: SupervisorState | None = None, **changes: Any) -> NodeFacts:
    return NodeFacts.model_validate({"cell": cell, "node": 0, "state": state, **changes})


def facts(east: NodeFacts | None = None, west: NodeFacts | None = None, **changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "relay": relay(),
        "nodes": (east or node(0, running()), west or node(1, running())),
    }
    return Facts.model_validate({**fields, **changes})


def joint(step: int, attempt: int = 1) -> JointCheckpoint:
    return JointCheckpoint(attempt=attempt, step=step, manifests=("a", "b"), versions=(1, 1))
