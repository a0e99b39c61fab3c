"""Stop: a joint checkpoint, an orderly end, and the proof that no process of the run is left anywhere."""

from __future__ import annotations

import time

from islandctl.config.model import Model
from islandctl.config.paths import RunFolder
from islandctl.errors import IslandError, RunError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.planner.plan import Plan
from islandctl.relay.messages import RelayStatus
from islandctl.runs import record as records
from islandctl.runs.files import only_one
from islandctl.runs.reach import Reach, Say, each
from islandctl.runs.record import NodeRecord, RunRecord
from islandctl.runs.relay import STOP_TIMEOUT_S, client
from islandctl.runs.workers import stop_workers

POLL_S = 0.5
_LIVE = ("starting", "running", "backoff", "stopping")


class StopReport(Model):
    """How a stop went."""

    run: str
    checkpoint: int | None = None
    """Step of the newest joint checkpoint, when the relay could tell."""
    left: tuple[str, ...] = ()
    """Processes that are still there, each with its place."""
    unknown: tuple[str, ...] = ()
    """Hosts that could not be asked, each with the reason."""
    troubles: tuple[str, ...] = ()
    """What did not go in good order, though nothing is left of it."""
    hosts: tuple[str, ...] = ()
    """Hosts that were searched and are clean."""

    @property
    def exit_code(self) -> int:
        """5 when the state of a host is unknown, 1 when something is left, else 0."""
        if self.unknown:
            return UnreachableError.exit_code
        return RunError.exit_code if self.left else 0

    @property
    def lines(self) -> list[str]:
        """The report for people."""
        lines = [f"trouble: {trouble}" for trouble in self.troubles]
        lines += [f"left: {one}" for one in self.left]
        lines += [f"unknown: {one}" for one in self.unknown]
        if self.hosts:
            lines.append(f"nothing of {self.run} is left on {', '.join(self.hosts)}")
        if self.checkpoint is not None:
            lines.append(f"newest joint checkpoint: step {self.checkpoint}; islandctl resume {self.run}")
        return lines


def stop(
    record: RunRecord, plan: Plan, say: Say, *, deadline_s: float, reason: str = "stopped by hand"
) -> StopReport:
    """Stop a run, whatever state it is in.

    Args:
        deadline_s: what the cells get to checkpoint and end together; 0 ends them at once.
        reason: goes into the record, and into the ledger where cells are asked to stop.
    """
    with (
        only_one(RunFolder.of(record.run).root / "lock", f"islandctl stop {record.run}"),
        Reach(plan, record.run, say) as reach,
    ):
        record = records.load(record.run)
        if record.phase == "launching" and not record.reached_workers:
            record = records.change(record, phase="failed", reason="the launch was cut short", launcher_pid=0)
        failed = record.phase == "failed"
        if not failed:
            record = records.change(record, phase="stopping", reason=reason)
        checkpoint = _together(record, reach, say, deadline_s) if record.cells else None
        report = end_everything(record, plan, reach, say).model_copy(update={"checkpoint": checkpoint})
        if not failed and not report.exit_code:
            records.change(record, phase="stopped")
        return report


def end_everything(record: RunRecord, plan: Plan, reach: Reach, say: Say) -> StopReport:
    """End workers, relay and tunnels, in this order, and search every host for what is left."""
    troubles = [
        f"{verdict.item.label}: {verdict.error.message}"
        for verdict in stop_workers(record, reach, record.nodes)
        if verdict.error is not None and not isinstance(verdict.error, UnreachableError)
    ]
    relay = [(record.relay.host, record.relay.folder)] if record.relay else []
    tunnels = [("", str(RunFolder.of(record.run).tunnels / one.name)) for one in record.tunnels]

    def end(kept: tuple[str, str]) -> None:
        nodes.stop(reach.beside(kept[0]), kept[1], STOP_TIMEOUT_S + 10.0)

    troubles += [
        f"{verdict.item[1]}: {verdict.error.message}"
        for verdict in [*each(relay, end), *each(tunnels, end)]
        if verdict.error is not None and not isinstance(verdict.error, UnreachableError)
    ]
    left, unknown, clean = _search(record, plan, reach)
    return StopReport(
        run=record.run, left=tuple(left), unknown=tuple(unknown), troubles=tuple(troubles), hosts=tuple(clean)
    )


def _together(record: RunRecord, reach: Reach, say: Say, deadline_s: float) -> int | None:
    """Ask the cells through the relay to checkpoint and end together; wait for it. Gives the joint step."""
    if deadline_s > 0 and _living(record, reach):
        try:
            with client(record) as relay:
                if not _has_trained(relay.status(), record.attempt):
                    say("no cell has trained yet: there is nothing to checkpoint")
                    return None
                relay.stop(record.reason)
        except IslandError as error:
            say(f"the relay cannot pass the word on ({error.message}); ending the workers one by one")
        else:
            say("the cells checkpoint at the next commit and end")
            _wait(record, reach, say, deadline_s)
    try:
        with client(record) as relay:
            joint = relay.status().joint_checkpoints
    except IslandError:
        return None
    return joint[-1].step if joint else None


def _has_trained(status: RelayStatus, attempt: int) -> bool:
    beats = [cell.heartbeat for cell in status.cells if cell.heartbeat is not None]
    return any(beat.attempt == attempt and beat.step > 0 for beat in beats)


def _wait(record: RunRecord, reach: Reach, say: Say, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    seen: set[str] = set()
    while time.monotonic() < end:
        living = _living(record, reach)
        names = {node.label for node in living}
        for node in record.nodes:
            if node.label not in names | seen:
                seen.add(node.label)
                say(f"{node.label}: ended")
        if not living:
            return
        time.sleep(POLL_S)
    say(f"not all cells ended within {deadline_s:g} s; their supervisors end them now")


def _living(record: RunRecord, reach: Reach) -> list[NodeRecord]:
    """Nodes whose supervisor lives. One that cannot be asked is not waited for: its state is unknown."""

    def lives(node: NodeRecord) -> bool:
        return nodes.state(reach.host(node.site, node.host), node.folder).state in _LIVE

    return [verdict.item for verdict in each(record.nodes, lives) if verdict.value]


def _search(record: RunRecord, plan: Plan, reach: Reach) -> tuple[list[str], list[str], list[str]]:
    """Search controller and hosts for the run's mark: (what is left, who could not be asked, who is clean)."""
    places: list[tuple[str, str]] = [("", "")]
    places += [("", record.relay.host)] if record.relay and record.relay.host else []
    places += dict.fromkeys((cell.site, node.host) for cell in plan.cells for node in cell.nodes if node.host)

    def look(place: tuple[str, str]) -> tuple[str, list[nodes.Leftover]]:
        site, name = place
        host = reach.host(site, name) if site else reach.beside(name)
        found = nodes.leftovers(host, record.mark)
        if found:
            nodes.end_leftovers(host, record.mark)
            found = nodes.leftovers(host, record.mark)
        return host.label, found

    left, unknown, clean = [], [], []
    for verdict in each(places, look):
        if verdict.value is None:
            label = "/".join(part for part in verdict.item if part) or "this machine"
            unknown.append(f"{label}: {verdict.error.message if verdict.error else 'no answer'}")
            continue
        label, found = verdict.value
        left += [f"{label}: process {one.pid} ({one.job}): {one.command}" for one in found]
        clean += [] if found else [label]
    return left, unknown, clean
