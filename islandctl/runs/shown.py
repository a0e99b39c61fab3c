"""What a run has shown so far, gathered from the files that it has left where it ran."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from islandctl.config.paths import CellFolder
from islandctl.errors import IslandError, UnreachableError, UsageError
from islandctl.fleet import node as nodes
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.from_run import Shown
from islandctl.planner.measured import (
    CellShown,
    Counted,
    cell_shown,
    parse_lines,
    round_times,
    with_bytes,
    with_rounds,
)
from islandctl.planner.plan import Plan
from islandctl.relay.glance import LAST_NAME, NAME, Glance
from islandctl.runs.checkpoints import ledger_from_file
from islandctl.runs.reach import Reach, Say, each, told
from islandctl.runs.record import CellRecord, RunRecord, check_plan_of, load_plan_of

METRICS_BYTES = 16 << 20
"""Read of each cell's metrics, from the end."""


def shown_by(record: RunRecord, say: Say) -> Shown:
    """Everything that the run's files tell of what its plan had foretold.

    A site that does not answer is left out with a message; so are bytes when the relay's folder cannot be read.

    Raises:
        UsageError: the run has not trained yet, or its plan is not there.
        UnreachableError: nobody answers.
    """
    plan = load_plan_of(record)
    check_plan_of(record, plan)
    with Reach(plan, record.run, say) as reach:
        verdicts = each(record.cells, lambda cell: _metrics(cell, reach))
        for verdict in verdicts:
            if verdict.error is not None:
                say(told(verdict.item.name, verdict.error))
        if verdicts and all(verdict.error is not None for verdict in verdicts):
            raise UnreachableError(f"{record.run}: no site answers", hint=f"islandctl status {record.run}")
        lines = [verdict.value or [] for verdict in verdicts]
        cells = [cell_shown(cell.name, own) for cell, own in zip(record.cells, lines, strict=True)]
        cells = with_rounds(cells, [round_times(own) for own in lines])
        if not any(cell.steps for cell in cells):
            raise UsageError(
                f"{record.run}: no step of it is known yet", hint=f"islandctl status {record.run} shows how it goes"
            )
        try:
            cells = _bytes(record, plan, reach, cells)
        except IslandError as error:
            say(told("the relay's files", error))
    return Shown(run=record.run, plan=plan, cells=tuple(cells))


def _metrics(cell: CellRecord, reach: Reach) -> list[dict[str, Any]]:
    node = cell.nodes[0]
    path = CellFolder(PurePosixPath(node.cell_folder)).metrics
    return parse_lines(nodes.read_tail(reach.host(node.site, node.host), path, METRICS_BYTES))


def _bytes(record: RunRecord, plan: Plan, reach: Reach, cells: list[CellShown]) -> list[CellShown]:
    if record.relay is None or plan.recipe.model is None:  # of a script's model the plan knows no fragments
        return cells
    folder = PurePosixPath(record.relay.folder).parent
    files = [(folder / name, 0, METRICS_BYTES) for name in (NAME, LAST_NAME)]
    now, ended = nodes.read_many(reach.beside(record.relay.host), files)
    try:
        status = Glance.model_validate_json(now.data or ended.data).status
    except ValidationError:  # it was never up for a second
        return cells
    counted = [Counted(packets=one.packets, bytes_up=one.bytes_up, bytes_down=one.bytes_down) for one in status.cells]
    exchange = plan.recipe.exchange
    first = 1 if exchange.warmup else 0
    regular = range(first, first - (exchange.warmup - plan.recipe.training.steps) // exchange.window)
    return with_bytes(
        cells,
        counted,
        ledger_from_file(record, reach),
        fragment_sizes(plan.recipe.decoder, exchange),
        windows=regular,
    )
