"""From what lies in a cell's folder, and what Slurm says of its job, to the state of the cell's supervisors. Pure.

The order of trust: our own exit record, then squeue, scontrol, sacct. Nothing is concluded from silence: a job that
nobody knows any more, and that left no record, is lost and not failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from islandctl.fleet.job import SupervisorState
from islandctl.fleet.slurm_text import Job
from islandctl.fleet.supervisor import NODE_LOST, PREEMPTED

FRESH_S = 20.0
"""A supervisor that has written within so many seconds runs, and Slurm need not be asked: it writes every 2 s."""
STALE_S = 90.0
"""Clocks differ and shared file systems lag; a longer silence is worth a word."""
UNSHARED = 76
"""How a job's script ends where its node does not see what the login node has written."""
_REASONS = {
    "BeginTime": "queued again; Slurm starts a job that was requeued after two minutes at the earliest",
    "BadConstraints": "no node is as slurm.constraint asks for",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that has failed: it will never start",
    "JobHeldAdmin": "held by an administrator: ask them",
    "JobHeldUser": "held",
    "launch_failed_requeued_held": "held, since a node could not start it",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "asks for more nodes than the partition gives: it will not start",
    "PartitionTimeLimit": "slurm.time is more than the partition allows: it will not start",
    "Priority": "others come first",
    "ReqNodeNotAvail": "nodes that it needs are reserved or down",
    "Resources": "waits for nodes to become free",
}
_HOPELESS = ("BadConstraints", "DependencyNeverSatisfied", "PartitionNodeLimit", "PartitionTimeLimit")
_HELD = ("JobHeldUser", "launch_failed_requeued_held")


def fresh(files: Sequence[SupervisorState]) -> bool:
    """Do the files alone say what the supervisors do?"""
    return all(
        (one.state == "ended" and not taken(one)) or (one.runs and (one.beat_age_s or 0.0) < FRESH_S) for one in files
    )


def taken(file: SupervisorState) -> bool:
    """Has it ended because Slurm took its node away, or was about to?"""
    return (file.state, file.outcome, file.kind) == ("ended", "stopped", PREEMPTED)


def judge(
    files: Sequence[SupervisorState],
    submission: Mapping[str, Any] | None,
    job: Job | None,
    finished: bool,
    log: str,
) -> list[SupervisorState]:
    """The state of every supervisor of a cell.

    Args:
        files: as ``state.json`` and ``exit.json`` have it; nobody has looked at processes.
        submission: ``slurm.json``; None: nothing was ever submitted.
        job: as Slurm told of it; None: it knows no such job.
        finished: the workers have said that they are through (``outcome.json``).
        log: the last line of the job's own log.
    """
    return [
        _of(one, submission, job, finished, log)
        if one.state != "ended"
        else _preempted(one, submission, job)
        if taken(one)
        else one
        for one in files
    ]


def _preempted(file: SupervisorState, submission: Mapping[str, Any] | None, job: Job | None) -> SupervisorState:
    """It has ended in good order, and begins again when its job does; where there is no such job, the end stands."""
    if submission is None or job is None:
        return file
    if job.phase == "ended":
        return file.model_copy(update={"reason": ended_words(job, f"Slurm's job {job.id}", file.reason)})
    reason = waits(job, submission) if job.phase == "waiting" else f"interrupted; job {job.id} is {job.state}"
    return SupervisorState(state="pending", restarts=file.restarts, reason=reason)


def _of(
    file: SupervisorState, submission: Mapping[str, Any] | None, job: Job | None, finished: bool, log: str
) -> SupervisorState:
    if submission is None:
        return file
    who = f"Slurm's job {submission.get('job') or submission['name']}"
    phase = job.phase if job is not None else None
    if job is not None and phase == "waiting":
        return file.model_copy(update={"state": "pending", "node": "", "reason": waits(job, submission)})
    if job is not None and phase in ("running", "ending", "unknown"):
        return _running(file, job, who, log)
    if finished:
        done = {"state": "ended", "outcome": "finished", "reason": ""}
        return file.model_copy(update=done)
    if job is None or job.state == "COMPLETED":
        told = "is not known to Slurm any more" if job is None else "has ended"
        reason = f"{who} {told}, and left no record of how: was it killed? {log}".rstrip()
        return file.model_copy(update={"state": "lost", "reason": reason, "orphans": False})
    outcome = "stopped" if job.state in ("CANCELLED", "PREEMPTED", "REVOKED") else "failed"
    reason = ended_words(job, who, log if outcome == "failed" else "")
    kind = PREEMPTED if outcome == "stopped" else NODE_LOST if job.state == "NODE_FAIL" else ""
    return file.model_copy(update={"state": "ended", "outcome": outcome, "kind": kind, "reason": reason})


def waits(job: Job, submission: Mapping[str, Any]) -> str:
    """Why a job waits: ``job 12: Resources: waits for nodes to become free; Slurm expects it to start at …``."""
    before = submission.get("interrupted") or {}
    told = f"was interrupted ({before['why']}); " if before else ""
    state = "" if job.state == "PENDING" else f"{job.state}: "
    reason, key = job.reason or "no reason given", _key(job)
    meaning = _REASONS.get(key, "")
    said = f"{told}job {job.id}: {state}{reason}" + (f": {meaning}" if meaning else "")
    if key in _HELD:
        said += f"; scontrol release {job.id} lets it go"
    if job.start is not None:
        said += f"; Slurm expects it to start at {datetime.fromtimestamp(job.start, UTC):%Y-%m-%d %H:%M} UTC"
    return said


def hopeless(job: Job) -> bool:
    """Does it wait for what will never come?"""
    return job.phase == "waiting" and _key(job) in _HOPELESS


def _key(job: Job) -> str:
    """The reason as one word."""
    return job.reason.partition(",")[0].strip("() ").replace(" ", "_")


def _running(file: SupervisorState, job: Job, who: str, log: str) -> SupervisorState:
    if job.state in ("SUSPENDED", "STOPPED"):
        return file.model_copy(update={"state": "pending", "reason": f"{who} is {job.state}"})
    if not file.runs:
        reason = f"{who} is {job.state}" + (f" on {job.nodes}" if job.nodes else "")
        return file.model_copy(update={"state": "starting", "reason": f"{reason}: {log}" if log else reason})
    if file.beat_age_s is not None and file.beat_age_s > STALE_S:
        silent = f"nothing new in its files for {file.beat_age_s:.0f} s, or its node's clock is off"
        reason = f"{silent}; {who} is {job.state} on {job.nodes}"
        return file.model_copy(update={"reason": reason})
    return file


def ended_words(job: Job, who: str, log: str) -> str:
    """How a job ended, with the last line of its log where that says more."""
    if job.exit_code.partition(":")[0] == str(UNSHARED):
        place = job.nodes or "its node"
        shared = "work_dir must lie on a file system that the login node and all nodes share"
        return f"{who} did not find its folder on {place}: {shared}"
    return f"{who} ended: {job.told}" + (f": {log}" if log else "")
