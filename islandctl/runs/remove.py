"""Remove a run: its files on the sites, its relay's, and in the end its record here. Never while it lives."""

from __future__ import annotations

import secrets
import shutil
from pathlib import PurePosixPath

from islandctl.config.model import Model
from islandctl.config.paths import CellFolder, RunFolder
from islandctl.errors import UnreachableError, UsageError
from islandctl.fleet import node as nodes
from islandctl.planner.plan import Plan
from islandctl.runs import record as records
from islandctl.runs.files import only_one
from islandctl.runs.reach import Reach, Say, demand, each
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord
from islandctl.runs.search import HERE, Found, everywhere, mark_in_files, places, search


class Removal(Model):
    """What is gone of a run, and what is not."""

    run: str
    """Its name."""
    removed: tuple[str, ...] = ()
    """Folders that are gone, each with its place."""
    kept: tuple[str, ...] = ()
    """Folders that stay, each with its place: the cells' checkpoints, and all on hosts that could not be asked."""
    unknown: tuple[str, ...] = ()
    """Hosts of which nobody knows whether a process of the run lives there."""

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        return [
            *(f"not proven: {one}" for one in self.unknown),
            *(f"removed: {one}" for one in self.removed),
            *(f"kept: {one}" for one in self.kept),
        ]


def remove(run: str, say: Say, *, checkpoints: bool, forget: bool) -> Removal:
    """Remove a run that has ended, everywhere; afterwards its name is free.

    Args:
        checkpoints: the cells' checkpoints as well.
        forget: also when a host cannot be asked. Whatever is there stays, and nothing proves that it is idle.

    Raises:
        UsageError: there is no such run, or it still runs.
        UnreachableError: a host cannot be asked; nothing has been removed then.
    """
    records.check_known(run)
    folder = RunFolder.of(run)
    with only_one(folder.root / "lock", f"islandctl remove {run}"):
        record, mark = _what_is_known(run)
        report = Removal(run=run)
        if mark:
            plan, trouble = _plan(run, forget)
            with Reach(plan, run, say) as reach:
                where = [HERE] if plan is None else places(record, plan) if record else everywhere(plan)
                found = search(run, mark, where, reach, end=False)
                _check_ended(found, mark, forget)
                report = Removal(run=run, unknown=(trouble,))
                if plan is not None:
                    report = _remove_far(record, mark, plan, reach, found, checkpoints)
        # first out of sight: a folder that is half gone is no run
        doomed = folder.root.with_name(f".{run}.{secrets.token_hex(4)}")
        folder.root.rename(doomed)
        shutil.rmtree(doomed)
    return report.model_copy(update={"removed": (*report.removed, f"this machine: {folder.root}")})


def _what_is_known(run: str) -> tuple[RunRecord | None, str]:
    """Its record, None where that cannot be read, and its mark, empty where nothing was ever started."""
    try:
        record = records.load(run)
    except UsageError:
        return None, mark_in_files(run)
    return record, "" if record.gives_way else record.mark


def _plan(run: str, forget: bool) -> tuple[Plan | None, str]:
    """The plan, which knows the hosts; None and what is wrong with it, where the run is to be forgotten all the same.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return records.load_plan(run), ""
    except UsageError as error:
        if forget:
            return None, f"all hosts but this machine, since {error.message}"
        raise UsageError(error.message, hint=f"{error.hint}; or islandctl remove {run} --forget") from error


def _check_ended(found: Found, mark: str, forget: bool) -> None:
    if found.left:
        raise UsageError(
            f"{found.run} still runs: {'; '.join(found.left)}", hint=f"islandctl stop {found.run} ends it first"
        )
    if found.unknown and not forget:
        raise UnreachableError(
            f"nothing proves that {found.run} has ended everywhere: {'; '.join(found.unknown)}",
            hint=f"again when that is mended; or islandctl remove {found.run} --forget, and see there that no "
            f"process has ISLANDCTL_RUN={mark} in its environment",
        )


def _remove_far(
    record: RunRecord | None, mark: str, plan: Plan, reach: Reach, found: Found, checkpoints: bool
) -> Removal:
    """Remove what lies on the nodes, and with a relay elsewhere; leave out hosts that did not answer.

    Raises:
        UnreachableError, PreflightError: something could not be removed; the record stays, to try again.
    """
    told = tuple(f"{one}; its processes would have ISLANDCTL_RUN={mark}" for one in found.unknown)
    if record is None:  # it alone knows where they lie
        kept = tuple(f"{site.name}: {site.work_dir}/runs/{mark}" for site in plan.sites)
        return Removal(run=found.run, kept=kept, unknown=told)

    def clear(cell: CellRecord) -> tuple[list[str], list[str]]:
        gone, stays = [], []
        for node in {(node.host, node.cell_folder): node for node in cell.nodes}.values():
            # one after another: they may share their storage
            place = f"{node.label}: {node.cell_folder}"
            if node.host and node.label not in found.hosts:
                stays.append(place)
                continue
            if _clear_node(node, reach, checkpoints):
                gone.append(place)
            if nodes.list_checkpoints(reach.host(node.site, node.host), node.cell_folder):
                stays.append(f"{node.label}: {CellFolder(PurePosixPath(node.cell_folder)).checkpoints}")
        return gone, stays

    cells = record.cells if record.reached_workers else ()
    cleared = demand(each(cells, clear), "removing the cells' files")
    removed = [place for gone, _ in cleared for place in gone]
    stay = [place for _, stays in cleared for place in stays]
    for visit in record.visits:
        place = f"{visit.site}/{visit.host}: {visit.folder}"
        if f"{visit.site}/{visit.host}" not in found.hosts:
            stay.append(place)
        elif nodes.remove(reach.host(visit.site, visit.host), visit.work_dir, visit.folder, emptied=True):
            removed.append(place)
    if record.relay and record.relay.host:
        name, data = record.relay.host, PurePosixPath(record.relay.folder).parent
        label = f"{reach.profile_beside(name).name}/{name}"
        if label not in found.hosts:
            stay.append(f"{label}: {data}")
        elif nodes.remove(reach.beside(name), data.parents[2], data, emptied=True):
            removed.append(f"{label}: {data}")
    return Removal(run=record.run, removed=tuple(removed), kept=tuple(stay), unknown=told)


def _clear_node(node: NodeRecord, reach: Reach, checkpoints: bool) -> bool:
    host = reach.host(node.site, node.host)
    keep = "" if checkpoints else "checkpoints"
    return nodes.remove(host, node.work_dir, node.cell_folder, keep=keep, emptied=True)
