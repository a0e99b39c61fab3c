"""What squeue, scontrol and sacct print, read without trust: versions differ, fields are cut, missing or odd.

Pure. Only formats are asked for that have kept their meaning since Slurm 17: ``squeue -o`` with single-letter fields,
``scontrol show job -o`` and ``sacct -P``. Times are in UTC, since the commands run with TZ=UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

SQUEUE_FORMAT = "%i|%T|%r|%S|%V|%N|%j"
"""Id, state, reason, start (of a waiting job: expected), submitted, nodes, name."""
SINFO_FORMAT = "%N|%T|%l|%a|%P|%H|%u|%E"
"""Node, state, the partition's limit, whether it is open, its name, when and by whom the reason was given, reason."""
SACCT_FIELDS = "JobID,State,ExitCode,Start,Submit,NodeList"
Phase = Literal["waiting", "running", "ending", "ended", "unknown"]

_PHASES: dict[Phase, tuple[str, ...]] = {
    "waiting": (
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
        "POWER_UP_NODE",
    ),
    "running": ("RUNNING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"),
    "ending": ("COMPLETING", "STAGE_OUT"),
    "ended": (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    ),
}
_UNFIT = (
    *("down", "drained", "draining", "drain", "error", "fail", "failing", "future", "inval", "unknown"),
    *("maint", "reserved"),
)
"""States of a node that no job of ours gets."""
_KNOWN = tuple(name for names in _PHASES.values() for name in names)
_NOTHING = ("", "N/A", "n/a", "None", "none", "(null)", "Unknown", "UNKNOWN", "NONE")
_ID = re.compile(r"(\d+)(?:_(?:\d+|\[[^]]*\])|\+\d+)?(?:\.[\w+]+)?(?:;([\w.-]+))?")


@dataclass(frozen=True)
class Job:
    """One job, as far as Slurm told of it."""

    id: str
    """The number alone: of ``12_3`` (array) 12, of ``21+0`` (heterogeneous) 21."""
    state: str
    """Its state's full name, or what was printed where that is no state we know."""
    reason: str = ""
    """Why it waits; empty: no reason is given."""
    start: float | None = None
    """Seconds since 1970: when it started, or is expected to."""
    submitted: float | None = None
    nodes: str = ""
    """As Slurm writes lists: ``n[1-4]``."""
    exit_code: str = ""
    """``code:signal``."""
    name: str = ""
    note: str = ""
    """What stood behind the state: ``by 1000``."""

    @property
    def phase(self) -> Phase:
        """Where in its life it is. ``unknown`` is a state of its own, and nothing is concluded from it."""
        return next((phase for phase, names in _PHASES.items() if self.state in names), "unknown")

    @property
    def told(self) -> str:
        """For messages: ``CANCELLED by 1000``, ``FAILED, exit code 1``."""
        code, _, signal = self.exit_code.partition(":")
        told = " ".join(filter(None, (self.state, self.note)))
        if self.phase != "ended" or {code, signal} <= {"", "0"}:
            return told
        return f"{told}, exit code {code}" if code != "0" else f"{told}, signal {signal}"


@dataclass(frozen=True)
class SlurmNode:
    """One node of a partition, as ``sinfo`` told of it."""

    name: str
    state: str
    """In Slurm's words, without the signs behind it: ``idle``, ``drained``, ``down``."""
    answers: bool
    """Does it answer to Slurm's controller?"""
    limit_s: float | None
    """The partition's time limit; None: there is none."""
    open: bool
    """Does the partition take jobs?"""
    partition: str
    usual: bool
    """Is it the partition of jobs that name none?"""
    reason: str = ""
    """Why it cannot be used, with who said so and when; empty: nobody did."""

    @property
    def fit(self) -> bool:
        """Can a job get it, sooner or later?"""
        return self.answers and self.state not in _UNFIT


def job_id(text: str) -> str | None:
    """The number in a job's id of any kind: ``12``, ``12_3``, ``12_[1-4]``, ``21+0``, ``12.batch``; None: no id."""
    found = _ID.fullmatch(text.strip())
    return found[1] if found else None


def state_name(text: str) -> tuple[str, str]:
    """The full name of a state, and what else was said: ``CANCELLED+``, ``CANCELLED by 1000``, ``OUT_OF_ME+``."""
    word, _, note = text.strip().partition(" ")
    if word in _KNOWN:
        return word, note.strip()
    cut = word.rstrip("+")
    if cut != word and len(near := [name for name in _KNOWN if name.startswith(cut)]) == 1:
        return near[0], note.strip()
    return word or "UNKNOWN", note.strip()


def seconds(text: str) -> float | None:
    """A time as Slurm writes it, in UTC; None where there is none."""
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def parse_squeue(output: str) -> list[Job]:
    """Jobs from ``squeue -h -o SQUEUE_FORMAT``; lines that are none (banners, warnings) are passed over."""
    found = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|", 6)]
        fields += [""] * (7 - len(fields))
        number = job_id(fields[0])
        if number is None or not fields[1]:
            continue
        state, note = state_name(fields[1])
        _, _, reason, start, submitted, nodes, name = (_said(field) for field in fields)
        found.append(
            Job(number, state, reason, seconds(start), seconds(submitted), nodes=nodes, name=name, note=note)
        )
    return found


def parse_scontrol(output: str) -> Job | None:
    """The job from ``scontrol show job -o``; of a heterogeneous or array job the first; None: it is not there."""
    for line in output.splitlines():
        fields: dict[str, str] = {}
        # a value may hold blanks (Command, Comment, WorkDir): it ends where the next Key= begins
        for key, value in re.findall(r"(?:^|(?<=\s))([A-Za-z][\w/:]*)=(.*?)(?=\s[A-Za-z][\w/:]*=|$)", line.strip()):
            fields.setdefault(key, value.strip())
        number = job_id(fields.get("JobId", ""))
        if number is None:
            continue
        state, note = state_name(fields.get("JobState", ""))
        return Job(
            number,
            state,
            _said(fields.get("Reason", "")),
            seconds(fields.get("StartTime", "")),
            seconds(fields.get("SubmitTime", "")),
            nodes=_said(fields.get("NodeList", "")),
            exit_code=fields.get("ExitCode", ""),
            name=_said(fields.get("JobName", "")),
            note=note,
        )
    return None


def parse_sacct(output: str, number: str) -> Job | None:
    """The job ``number`` from ``sacct -n -P -o SACCT_FIELDS``, of several lives the last; None: it is not there."""
    last = None
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 2 or "." in fields[0] or job_id(fields[0]) != number:
            continue
        fields += [""] * (6 - len(fields))
        state, note = state_name(fields[1])
        last = Job(
            number,
            state,
            start=seconds(fields[3]),
            submitted=seconds(fields[4]),
            nodes=_said(fields[5]).removeprefix("None assigned"),
            exit_code=fields[2],
            note=note,
        )
    return last


def parse_sinfo(output: str) -> list[SlurmNode]:
    """Nodes from ``sinfo -N -h -o SINFO_FORMAT``, once for each partition; lines that are none are passed over."""
    found = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split("|", 7)]
        if len(fields) < 8 or not fields[0] or not fields[1]:
            continue
        name, state, limit, there, partition, at, who, reason = fields
        bare = state.rstrip("*~#!%$@^-+").lower()
        said = _said(reason)
        by = ", ".join(filter(None, (_said(who), _said(at)))) if said else ""
        found.append(
            SlurmNode(
                name,
                bare,
                answers="*" not in state,
                limit_s=time_limit(limit),
                open=there.lower() == "up",
                partition=partition.rstrip("*"),
                usual=partition.endswith("*"),
                reason=f"{said} ({by})" if by else said,
            )
        )
    return found


def longest(nodes: Sequence[SlurmNode]) -> float | None:
    """The longest time limit of the nodes' partitions, in seconds; None: there is none."""
    limits = [node.limit_s for node in nodes]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def time_limit(text: str) -> float | None:
    """Seconds of ``30:00``, ``2:00:00``, ``1-00:00:00``; None: there is no limit, or none is told."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds_ = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds_)


def newest(jobs: Iterable[Job]) -> Job | None:
    """The job that was submitted last; one that still lives before one that has ended."""
    return max(jobs, key=lambda job: (job.phase != "ended", job.submitted or 0.0, int(job.id)), default=None)


def _said(field: str) -> str:
    return "" if field in _NOTHING else field
