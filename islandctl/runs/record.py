"""A run's record on the controller: ``run.json`` says what runs, where, and how far the controller has come with it.

The record holds no live state: that is read from the nodes and the relay, which know it.
"""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from islandctl.config.budget import Budget
from islandctl.config.model import Model, Name
from islandctl.config.pace import Pace
from islandctl.config.paths import RunFolder, home
from islandctl.errors import UsageError
from islandctl.runs.files import make_folder, only_one, write_whole

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan

Phase = Literal["launching", "launched", "stopping", "stopped", "failed"]
"""What the controller last did: ``failed`` means the launch did not get as far as the workers."""
FAILED = "failed: "
"""How the reason begins in the record of a run whose workers failed."""
FINISHED = "finished"
"""The reason in the record of a run that is through its steps."""


class NodeRecord(Model):
    """One node of a cell, with absolute paths on that node."""

    cell: int
    index: int
    site: str
    host: str
    """As written in the profile; empty for this machine."""
    num_ranks: int
    python: str
    """Interpreter of the prepared environment."""
    code: str
    """Folder that holds the package ``islandctl`` as sent."""
    supervisor: str
    """The supervisor's file."""
    work_dir: str
    cell_folder: str
    folder: str
    """The supervisor's folder, ``<cell_folder>/node-<index>``."""
    relay_url: str = ""
    """The relay, as this node reaches it."""

    @property
    def label(self) -> str:
        """``site/host``, as messages name the node."""
        return f"{self.site}/{self.host or 'local'}"

    def known_as(self, name: str) -> str:
        """The same with the scheduler's own name of the node; empty: it is not known, or the host is the node."""
        return f"{self.site}/{name}" if name else self.label


class CellRecord(Model):
    """One cell and its nodes."""

    index: int
    name: Name
    site: str
    nodes: tuple[NodeRecord, ...]
    pace: Pace | None = None
    """Where it takes steps of its own; None: its steps are the run's."""

    def own_step(self, step: int) -> int:
        """How many steps it has done where the run has done ``step``."""
        return step if self.pace is None else self.pace.own_step(step)

    def run_step(self, own: int) -> int:
        """The other way round."""
        return own if self.pace is None else self.pace.run_step(own)


class KeptRecord(Model):
    """The relay's supervisor."""

    name: str
    host: str = ""
    """Where it runs; empty for the controller."""
    python: str
    code: str
    supervisor: str
    folder: str
    """The supervisor's folder."""


class TunnelRecord(Model):
    """A tunnel kept on the controller, in ``tunnels/<name>``."""

    name: str
    site: str = ""
    """The site of ``host``; empty for the relay's own host."""
    host: str
    reverse: bool
    """``host_port`` there leads to ``local_port`` here; else the other way round."""
    host_port: int
    local_port: int
    porch: tuple[str, ...] = ()
    """What runs on ``host`` as long as the tunnel stands, to pass on what comes from its cluster's nodes; its first
    number is the port at which it listens."""

    @property
    def porch_ports(self) -> tuple[int, ...]:
        """Where the porch listens, if there is one."""
        return tuple(int(word) for word in self.porch[2:3])


class VisitRecord(Model):
    """A job of the doctor's on a Slurm site."""

    site: str
    host: str
    """The login node, as written in the profile."""
    work_dir: str
    folder: str
    """The job's, below ``work_dir``; ``~`` is the home there."""


class RunRecord(Model):
    """``run.json``."""

    version: Literal[1] = 1
    run: str
    mark: str
    """Unique id of the run; every process of it carries the mark in its environment (ISLANDCTL_RUN)."""
    created: str
    """UTC, ISO 8601."""
    plan_hash: str
    config_hash: str
    steps: int
    """Of the whole run, as the recipe has them. A cell can take others: see its ``pace``."""
    tokens_per_step: int
    """Tokens that one cell trains in a step of its own."""
    late_then: Literal["wait", "alone"] = "wait"
    """What the others do without a cell that is away."""
    budget: Budget | None = None
    """In place of the recipe's, since a resume has raised it."""
    attempt: int = 1
    phase: Phase = "launching"
    reason: str = ""
    """Why the phase is what it is, when that needs a word. While ``launched``: how the run was seen to have ended."""
    launcher_pid: int = 0
    """The process that launches; only read while the phase is ``launching``."""
    relay_url: str = ""
    """The relay, as the controller reaches it."""
    relay_port: int = 0
    """Where it listens on its own host."""
    relay: KeptRecord | None = None
    tunnels: tuple[TunnelRecord, ...] = ()
    cells: tuple[CellRecord, ...] = ()
    visits: tuple[VisitRecord, ...] = ()
    """Of an examination: the jobs in which it asks the nodes of Slurm sites."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """All nodes of all cells, in order."""
        return tuple(node for cell in self.cells for node in cell.nodes)

    @property
    def reached_workers(self) -> bool:
        """Did the launch get as far as workers that know their relay? Before that there is nothing to resume.

        Nor is there anything to stop on the nodes: nothing was ever started there.
        """
        return bool(self.relay_url and self.nodes) and all(node.relay_url for node in self.nodes)

    @property
    def last_known(self) -> str:
        """As a command last saw it: the phase, or how the run came out."""
        if self.reason == FINISHED:
            return FINISHED
        if self.reason.startswith(FAILED):
            return "failed"
        return "stopped" if self.phase == "launched" and self.reason else self.phase

    @property
    def gives_way(self) -> bool:
        """The launch failed before it had started anything anywhere: another one may take the name."""
        return self.phase == "failed" and self.relay is None and not self.visits


def now() -> str:
    """The wall clock as people and records write it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def save(record: RunRecord) -> RunRecord:
    """Write ``run.json`` atomically; gives the record back."""
    write_whole(RunFolder.of(record.run).record, record.model_dump_json(indent=2).encode() + b"\n")
    return record


def change(record: RunRecord, **fields: object) -> RunRecord:
    """A copy with ``fields`` changed, checked and saved."""
    return save(RunRecord.model_validate({**dict(record), **fields}))


def default_name(recipe: str, today: str, taken: Sequence[str]) -> str:
    """``<recipe>-<date>-<counter>`` with the first counter that is free.

    Args:
        today: for example ``20300131``.
        taken: names in use.
    """
    stem = f"{recipe[:28].rstrip('-')}-{today}"
    return next(name for number in range(1, len(taken) + 2) if (name := f"{stem}-{number}") not in taken)


def create(plan: Plan, run: str | None, *, launcher_pid: int) -> RunRecord:
    """Take a run name and write its first record and its plan. The folder itself is the lock.

    Args:
        run: the name; None takes :func:`default_name`.

    Raises:
        UsageError: the name is taken or is not a name.
    """
    for _ in range(100):
        today = now()[:10].replace("-", "")
        name = default_name(plan.recipe.name, today, names()) if run is None else run
        _check_name(name)
        folder = RunFolder.of(name)
        make_folder(folder.root.parent)
        try:
            folder.root.mkdir(mode=0o700)
        except FileExistsError:
            if run is None:
                continue  # another launch took the counter between the look and the mkdir
            return _take_over(name, plan, launcher_pid)
        return _begin(name, plan, launcher_pid)
    raise UsageError("no free run name found", hint="choose a name with --run")


def _begin(name: str, plan: Plan, launcher_pid: int) -> RunRecord:
    """The first record and the plan, in the run's folder."""
    write_whole(RunFolder.of(name).plan, plan.model_dump_json(indent=2).encode() + b"\n")
    return save(
        RunRecord(
            run=name,
            mark=f"{name}.{secrets.token_hex(8)}",
            created=now(),
            plan_hash=plan.plan_hash,
            config_hash=plan.config_hash,
            steps=plan.recipe.training.steps,
            tokens_per_step=plan.recipe.training.batch * plan.recipe.training.sequence,
            late_then=plan.recipe.exchange.late.then,
            launcher_pid=launcher_pid,
        )
    )


def _take_over(name: str, plan: Plan, launcher_pid: int) -> RunRecord:
    """Take the name of a launch that failed before it had started anything; any other run keeps its name.

    Raises:
        UsageError: the name is taken.
    """
    taken = UsageError(
        f"a run called {name} exists already",
        hint=f"islandctl status {name} shows it; choose another name with --run, or islandctl remove {name}",
    )
    if not _gives_way(name):
        raise taken
    folder = RunFolder.of(name)
    with only_one(folder.root / "lock", f"islandctl launch {name}"):
        if not _gives_way(name):  # another launch was quicker
            raise taken
        return _begin(name, plan, launcher_pid)


def _gives_way(name: str) -> bool:
    try:
        return load(name).gives_way
    except UsageError:  # without a readable record nobody knows
        return False


def names() -> list[str]:
    """Names of all runs that have a folder here."""
    try:
        with os.scandir(home() / "runs") as found:
            return sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []


def load(run: str | None = None) -> RunRecord:
    """The record of ``run``, or of the newest run.

    Raises:
        UsageError: there is no such run; names the nearest ones.
    """
    if run is None:
        records = load_all()
        if not records:
            raise UsageError("there is no run yet", hint="islandctl launch RECIPE --site PROFILE starts one")
        return records[-1]
    check_known(run)
    path = RunFolder.of(run).record
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"{path.parent}: the run has no record; its launch was cut short before anything was started",
            hint=f"islandctl remove {run} frees its name",
        ) from error
    except ValidationError as error:
        raise UsageError(
            _first(path, error),
            hint="bring the file back, or was it written by another version? "
            f"islandctl stop {run} ends the run's processes all the same",
        ) from error


def check_known(run: str) -> None:
    """Is there a run of this name, whatever state its record is in?

    Raises:
        UsageError: there is none; names the nearest ones.
    """
    known = names()
    if run not in known:
        near = difflib.get_close_matches(run, known, n=3, cutoff=0.4)
        raise UsageError(
            f"there is no run called {run}",
            hint=f"nearest: {', '.join(near)}" if near else "islandctl runs lists them",
        )


def load_all() -> list[RunRecord]:
    """All readable records, oldest first."""
    records = []
    for name in names():
        try:
            records.append(load(name))
        except UsageError:
            continue  # a folder without a readable record is named by `load`, not by a list
    return sorted(records, key=lambda record: (record.created, record.run))


def load_plan_of(record: RunRecord) -> Plan:
    """The frozen plan of a run; see :func:`load_plan`."""
    return load_plan(record.run)


def load_plan(run: str) -> Plan:
    """The frozen plan of the run called ``run``.

    Raises:
        UsageError: it is missing or is no plan.
    """
    from islandctl.planner.plan import Plan  # many classes; most looks at a run do without it

    path = RunFolder.of(run).plan
    try:
        return Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"{path}: the run's plan is missing", hint="bring the file back from a copy") from error
    except ValidationError as error:
        raise UsageError(_first(path, error), hint="was it written by another version?") from error


def check_plan_of(record: RunRecord, plan: Plan) -> None:
    """Refuse a plan that is not the one that was launched.

    Raises:
        UsageError: it was changed since.
    """
    if plan.plan_hash != record.plan_hash:
        raise UsageError(
            f"{RunFolder.of(record.run).plan}: the plan is not the one that was launched (its hash differs)",
            hint="bring the file back; or it was written by another version of islandctl: resume with that one",
        )


def _first(path: Path, error: ValidationError) -> str:
    """The first fault of a file, with its place."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return ": ".join(filter(None, (str(path), place, first["msg"])))


def _check_name(name: str) -> None:
    try:
        CellRecord(index=0, name=name, site="", nodes=())
    except ValidationError as error:
        raise UsageError(
            f"'{name}' cannot be a run's name", hint="use a-z, 0-9 and inner hyphens, at most 42 characters"
        ) from error
