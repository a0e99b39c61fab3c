"""What other versions of Slurm print: formats, odd ids, cut and missing fields; and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from islandctl.fleet.job import SupervisorState
from islandctl.fleet.slurm_batch import parse_state
from islandctl.fleet.slurm_login import submitted
from islandctl.fleet.slurm_text import (
    Job,
    job_id,
    longest,
    newest,
    parse_sacct,
    parse_scontrol,
    parse_sinfo,
    parse_squeue,
    state_name,
    time_limit,
)
from islandctl.fleet.slurm_verdict import fresh, hopeless, judge

OUTPUTS = Path(__file__).parent / "slurm_outputs"
NAME = "demo.0123456789abcdef.oslo"


def output(version: str, command: str) -> str:
    text = (OUTPUTS / f"{version}.txt").read_text()
    return text.partition(f"$ {command}\n")[2].partition("\n$ ")[0] + "\n"


@pytest.mark.parametrize(
    ("version", "told", "start", "nodes"),
    [
        ("20.11", ("1201", "PENDING", "Resources", "waiting"), 1896100200.0, ""),
        ("21.08", ("21", "RUNNING", "", "running"), 1898589600.0, "n[1-2]"),
        ("22.05", ("4", "PENDING", "BeginTime", "waiting"), 1922322007.0, ""),
        ("23.02", ("77", "REQUEUE_HOLD", "launch failed requeued held", "waiting"), None, ""),
        ("24.05", ("900", "PENDING", "ReqNodeNotAvail, Reserved for maintenance", "waiting"), None, ""),
    ],
)
def test_squeue(version: str, told: tuple[str, ...], start: float | None, nodes: str) -> None:
    job = next(job for job in parse_squeue(output(version, "squeue")) if job.name == NAME)
    assert (job.id, job.state, job.reason, job.phase) == told
    assert (job.start, job.nodes) == (start, nodes)
    assert job.submitted is not None


def test_squeue_of_arrays_short_lines_and_states_that_nobody_knows() -> None:
    assert [job.id for job in parse_squeue(output("20.11", "squeue"))] == ["1201", "1202", "1203"]
    odd = {job.id: job for job in parse_squeue(output("24.05", "squeue"))}
    assert odd["901"].phase == "unknown"
    assert (odd["902"].state, odd["902"].name, odd["902"].start) == ("RUNNING", "", None)
    assert parse_squeue("") == []


@pytest.mark.parametrize(
    ("version", "state", "reason"),
    [
        ("20.11", "PENDING", "Resources"),
        ("21.08", "RUNNING", ""),
        ("22.05", "COMPLETING", ""),
        ("23.02", "REQUEUE_HOLD", "launch_failed_requeued_held"),
        ("24.05", "PENDING", "ReqNodeNotAvail,_Reserved_for_maintenance"),
    ],
)
def test_scontrol(version: str, state: str, reason: str) -> None:
    job = parse_scontrol(output(version, "scontrol"))
    assert job is not None
    assert (job.state, job.reason, job.name, job.exit_code) == (state, reason, NAME, "0:0")
    assert job.id == next(one.id for one in parse_squeue(output(version, "squeue")) if one.name == NAME)
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified\n") is None


@pytest.mark.parametrize(
    ("version", "number", "told"),
    [
        ("20.11", "1201", "CANCELLED by 1000"),
        ("21.08", "21", "RUNNING"),
        ("22.05", "4", None),
        ("23.02", "77", "CANCELLED"),
        ("24.05", "900", "PENDING"),
    ],
)
def test_sacct(version: str, number: str, told: str | None) -> None:
    job = parse_sacct(output(version, "sacct"), number)
    assert (job.told if job else None) == told
    assert job is None or job.nodes != "None assigned"


def test_ids_states_and_submissions() -> None:
    assert [job_id(text) for text in ("12", "12_3", "12_[1-4%2]", "21+0", "12.batch", "12_3.0", "12;far")] == [
        "12", "12", "12", "21", "12", "12", "12",
    ]  # fmt: skip
    assert [job_id(text) for text in ("", "JOBID", "n1", "12 13")] == [None] * 4
    assert state_name("CANCELLED by 1000") == ("CANCELLED", "by 1000")
    assert [state_name(text)[0] for text in ("CANCELLED+", "OUT_OF_ME+", "NODE_FAI+", "TIMEOUT")] == [
        "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL", "TIMEOUT",
    ]  # fmt: skip
    assert state_name("")[0] == "UNKNOWN"
    assert submitted("12\n") == "12"
    assert submitted("--> Verifying access to queue (gpu)...OK\n12;far\n") == "12"
    assert submitted("Submitted batch job 12 on cluster far\n") == "12"
    assert submitted("no number 12 here\n") is None
    assert newest(
        [Job("9", "COMPLETED"), Job("7", "PENDING", submitted=1.0), Job("8", "PENDING", submitted=2.0)]
    ) == Job("8", "PENDING", submitted=2.0)


def test_the_time_limit_is_not_the_end_of_a_grace_time() -> None:
    text = "JobState=RUNNING TimeLimit=1-02:00:30 StartTime=2030-01-01T00:00:00 EndTime=2030-01-01T00:01:00 x=1"
    assert parse_state(text, 1893456000.0 + 10) == ("RUNNING", 26 * 3600 + 30 - 10)
    assert parse_state(text.replace("1-02:00:30", "UNLIMITED"), 0.0) == ("RUNNING", None)
    assert parse_state("slurm_load_jobs error: Unable to contact slurm controller", 0.0) == ("", None)


# The verdict

SUBMISSION: dict[str, Any] = {"name": NAME, "job": "12"}
ABSENT = SupervisorState(state="absent")
STALE = SupervisorState(state="running", beat_age_s=200.0)


def verdict(file: SupervisorState, job: Job | None, **more: Any) -> tuple[str, str | None, str]:
    given: dict[str, Any] = {"submission": SUBMISSION, "finished": False, "log": "last words", **more}
    (state,) = judge([file], given["submission"], job, given["finished"], given["log"])
    return state.state, state.outcome, state.reason


def test_our_own_record_comes_first() -> None:
    done = SupervisorState(state="ended", outcome="finished")
    assert judge([done], SUBMISSION, Job("12", "FAILED"), False, "") == [done]
    assert fresh([done, SupervisorState(state="running", beat_age_s=1.0)])
    assert not fresh([done, STALE])
    assert not fresh([ABSENT])
    assert verdict(STALE, Job("12", "NODE_FAIL"), finished=True) == ("ended", "finished", "")
    assert verdict(ABSENT, None, submission=None) == ("absent", None, "")


def test_a_job_that_waits() -> None:
    waits = Job("12", "PENDING", "Resources", start=1896100200.0)
    assert verdict(ABSENT, waits)[2] == (
        "job 12: Resources: waits for nodes to become free; Slurm expects it to start at 2030-01-31 14:30 UTC"
    )
    assert verdict(STALE, Job("12", "PENDING", "AssocGrpGRES"))[::2] == ("pending", "job 12: AssocGrpGRES")
    held = verdict(ABSENT, Job("12", "REQUEUE_HOLD", "launch failed requeued held"))[2]
    assert held.startswith("job 12: REQUEUE_HOLD: launch failed requeued held: held, since a node could not start it")
    assert held.endswith("scontrol release 12 lets it go")
    before = {**SUBMISSION, "interrupted": {"why": "time limit"}}
    again = verdict(ABSENT, Job("12", "PENDING", "BeginTime"), submission=before)
    assert again[2].startswith("was interrupted (time limit); job 12: BeginTime: queued again")
    assert verdict(STALE, Job("12", "SUSPENDED"))[::2] == ("pending", "Slurm's job 12 is SUSPENDED")


def test_a_supervisor_that_was_preempted_begins_again_with_its_job() -> None:
    taken = SupervisorState(state="ended", outcome="stopped", kind="preempted", reason="at step 7", restarts=2)
    assert not fresh([taken])
    assert verdict(taken, Job("12", "PENDING", "Priority"))[::2] == ("pending", "job 12: Priority: others come first")
    assert verdict(taken, Job("12", "COMPLETING"))[::2] == ("pending", "interrupted; job 12 is COMPLETING")
    assert verdict(taken, Job("12", "CANCELLED")) == (
        "ended",
        "stopped",
        "Slurm's job 12 ended: CANCELLED: at step 7",
    )
    assert verdict(taken, None) == ("ended", "stopped", "at step 7")


def test_a_job_that_runs_and_says_nothing() -> None:
    runs = Job("12", "RUNNING", nodes="n[1-2]")
    assert verdict(ABSENT, runs, log="") == ("starting", None, "Slurm's job 12 is RUNNING on n[1-2]")
    said = "nothing new in its files for 200 s, or its node's clock is off; Slurm's job 12 is RUNNING on n[1-2]"
    assert verdict(STALE, runs) == ("running", None, said)
    assert verdict(STALE, Job("12", "HIBERNATING"))[0] == "running"


def test_a_job_that_ended_without_our_record() -> None:
    failed = Job("12", "FAILED", exit_code="127:0")
    assert verdict(ABSENT, failed) == ("ended", "failed", "Slurm's job 12 ended: FAILED, exit code 127: last words")
    assert "work_dir must lie on a file system" in verdict(ABSENT, Job("12", "FAILED", exit_code="76:0"))[2]
    memory = Job("12", "OUT_OF_MEMORY", exit_code="0:125")
    assert verdict(STALE, memory, log="")[1:] == ("failed", "Slurm's job 12 ended: OUT_OF_MEMORY, signal 125")
    by_hand = Job("12", "CANCELLED", note="by 1000", exit_code="0:15")
    assert verdict(STALE, by_hand)[1:] == ("stopped", "Slurm's job 12 ended: CANCELLED by 1000, signal 15")
    assert verdict(STALE, None)[0] == "lost"
    assert "is not known to Slurm any more" in verdict(STALE, None)[2]
    assert verdict(STALE, Job("12", "COMPLETED"))[0] == "lost"


def test_sinfo() -> None:
    nodes = parse_sinfo(output("22.05", "sinfo"))
    assert [(node.name, node.partition, node.usual, node.fit) for node in nodes] == [
        ("n1", "low", True, True),
        ("n1", "high", False, True),
        ("n2", "low", True, False),
        ("n2", "high", False, False),
        ("n3", "apart", False, True),
    ]
    assert nodes[2].reason == "bad GPU | 3 (root, 2030-12-01T02:35:11)"
    assert longest(nodes) is None
    later = {node.name: node for node in parse_sinfo(output("24.05", "sinfo"))}
    assert [name for name, node in later.items() if node.fit] == ["gpu01", "gpu02", "gpu05"]
    assert (later["gpu03"].state, later["gpu03"].answers) == ("down", False)
    assert [later[name].open for name in ("gpu01", "gpu05")] == [True, False]
    assert longest(list(later.values())) == 86400.0
    assert parse_sinfo("") == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("30:00", 1800.0), ("2:00:00", 7200.0), ("1-12:00:00", 129600.0), ("infinite", None)]
)
def test_time_limit(text: str, seconds: float | None) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("state", "reason", "never"),
    [
        ("PENDING", "Resources", False),
        ("PENDING", "PartitionNodeLimit", True),
        ("PENDING", "BadConstraints", True),
        ("RUNNING", "PartitionNodeLimit", False),
    ],
)
def test_what_will_never_start(state: str, reason: str, never: bool) -> None:
    assert hopeless(Job("1", state, reason)) is never
