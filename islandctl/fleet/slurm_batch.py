"""The script of a cell's Slurm job, on its first node. Standard library only.

    python -m islandctl.fleet.slurm_batch CELL_FOLDER

It has ``slurm_node`` run on every node by srun, and decides what follows when that has ended: an end, another try, or
the queue again.
"""

from __future__ import annotations

import calendar
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from islandctl.fleet.slurm_node import key
from islandctl.fleet.supervisor import LIVE, PREEMPTED, furthest, read_json, utc, write_json

CRASHES = 5
"""So often the nodes' tasks are begun again in one job without a new step in between."""
QUEUE_AGAIN = ("RUNNING", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
"""States in which a job asks for the queue. One that somebody has cancelled would come back to life."""
NEAR_S = 120.0
"""Slurm may send its signal a minute early, and a checkpoint takes its time."""
BRIEF_S, BRIEF_LIVES = 120.0, 3
"""So many lives in a row that ended so soon, without a new step, end the cell: it would be queued for ever."""
SILENT_S = 120.0
"""So long Slurm's controller may be away when the job wants to be queued again."""


def batch(cell: str) -> int:
    """The job's script. Returns its exit code: 0 for an end as it should be, 1 where the cell has failed."""
    submission = read_json(os.path.join(cell, "slurm.json"))
    if submission is None:
        raise SystemExit(f"slurm.json is missing in {cell}")
    folders = [os.path.join(cell, f"node-{index}") for index in range(submission["nodes"])]
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # whatever it is, the nodes' tasks get it too; they are waited for
    metrics, began = os.path.join(cell, "metrics.jsonl"), time.monotonic()
    first = reached = furthest(metrics)
    crashes = 0
    while True:
        code = _step(cell, len(folders))
        states = [told(folder) for folder in folders]
        if all(state == "ended" for state in states):
            return int(any((_exit(folder) or {}).get("outcome") == "failed" for folder in folders))
        if code == 0 and all(state in ("ended", PREEMPTED) for state in states):
            brief = time.monotonic() - began < BRIEF_S and furthest(metrics) <= first
            return _queue_again(cell, folders, brief=brief)
        state, _ = job_state()
        if state not in ("RUNNING", ""):  # Slurm itself is ending the job, and starts it again if it means to
            return _queue_again(cell, folders, brief=False) if state in QUEUE_AGAIN else 1
        if furthest(metrics) > reached:
            crashes, reached = 0, furthest(metrics)
        crashes += 1
        say(f"the nodes' tasks have ended without their word (srun: exit code {code}), time {crashes}: {states}")
        if crashes >= CRASHES:
            return _give_up(folders, f"its supervisors ended without a word {crashes} times (slurm.log has srun's)")
        time.sleep(min(60.0, 2.0**crashes))


def _step(cell: str, num_nodes: int) -> int:
    """Run ``node`` on every node until all have ended."""
    argv = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--mpi=none"]
    argv += ["--cpu-bind=none", "--export=ALL", "--input=none", "--wait=0", "--kill-on-bad-exit=1"]
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # since 22.05 srun does not take it over
        argv.append(f"--cpus-per-task={cores}")
    argv += [sys.executable, "-P", "-m", "islandctl.fleet.slurm_node", cell]
    try:
        return subprocess.call(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        say(f"srun: {error.strerror}")
        return 127


def told(folder: str) -> str:
    """``ended``, ``preempted`` (or not begun yet), or ``lost``: neither was said."""
    ended = _exit(folder)
    if ended is not None:
        return PREEMPTED if (ended.get("outcome"), ended.get("kind")) == ("stopped", PREEMPTED) else "ended"
    state = (read_json(os.path.join(folder, "state.json")) or {}).get("state")
    return "lost" if state in LIVE else PREEMPTED


def _exit(folder: str) -> dict[str, Any] | None:
    return read_json(os.path.join(folder, "exit.json"))


def job_state() -> tuple[str, float | None]:
    """The job's state in Slurm's words, and the seconds until its time limit; empty: it gave no answer."""
    argv = ["scontrol", "show", "job", "-o", os.environ.get("SLURM_JOB_ID", "")]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, env={**os.environ, "TZ": "UTC"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", None
    return parse_state(done.stdout.decode(errors="replace"), time.time())


def parse_state(text: str, now: float) -> tuple[str, float | None]:
    """State, and seconds until the time limit (None: there is none), from ``scontrol show job -o`` in UTC.

    ``EndTime`` does not tell the limit: before a preemption Slurm puts it to the end of the grace time.
    """
    state, began = re.search(r"\bJobState=(\w+)", text), re.search(r"\bStartTime=(\d{4}-\d\d-\d\dT[\d:]{8})", text)
    limit = re.search(r"\bTimeLimit=(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    left = None
    if began and limit:
        days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
        begins = calendar.timegm(time.strptime(began[1], "%Y-%m-%dT%H:%M:%S"))
        left = begins + ((days * 24 + hours) * 60 + minutes) * 60 + seconds - now
    return state[1] if state else "", left


def _queue_again(cell: str, folders: list[str], *, brief: bool) -> int:
    """Have Slurm start this job again later. Where it will not, the supervisors' end is final.

    Args:
        brief: this life was too short to bring anything.
    """
    deadline = time.monotonic() + SILENT_S
    state, left = job_state()
    while not state and time.monotonic() < deadline:
        time.sleep(5.0)
        state, left = job_state()
    path = os.path.join(cell, "slurm.json")
    submission = read_json(path) or {}
    lives = submission.get("brief_lives", 0) + 1 if brief else 0
    if lives >= BRIEF_LIVES:
        said = f"its job was interrupted {lives} times within {BRIEF_S:.0f} s, before a new step"
        return _give_up(folders, f"{said}: is slurm.margin longer than its time limit allows?")
    near = left is not None and left < submission.get("margin_s", 0.0) + NEAR_S
    why = "time limit" if near or state == "TIMEOUT" else "Slurm needed its nodes"
    # the submission may have been noted only after the job had begun, so it is read just now
    more = {"job": os.environ["SLURM_JOB_ID"], "interrupted": {"at": utc(), "why": why}, "brief_lives": lives}
    write_json(path, dict(submission, **more))
    if state in QUEUE_AGAIN:
        try:
            done = subprocess.run(
                ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=60,
            )
            trouble = "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
        if not trouble:
            say(f"interrupted ({why}): queued again")
            return 0
        return _stop_there(folders, f"interrupted ({why}); Slurm did not queue it again: {trouble}")
    if state == "COMPLETING":  # preempted without a grace time: Slurm does it by itself
        return 0
    return _stop_there(folders, f"its job is {state or 'unknown to Slurm'}: it was not queued again")


def _stop_there(folders: list[str], reason: str) -> int:
    """The supervisors have ended in good order, and nobody starts them again by himself."""
    return _write_ends(folders, "stopped", reason)


def _give_up(folders: list[str], reason: str) -> int:
    words = [_last_line(os.path.join(folder, "logs", "supervisor.log")) for folder in folders]
    said = next(filter(None, words), "")
    return _write_ends(folders, "failed", f"{reason}: {said}" if said else reason) or 1


def _write_ends(folders: list[str], outcome: str, reason: str) -> int:
    say(f"{outcome}: {reason}")
    for folder in folders:
        if told(folder) != "ended":
            verdict = {"outcome": outcome, "code": None, "signal": None, "reason": reason, "restarts": 0, "at": utc()}
            write_json(os.path.join(folder, "exit.json"), verdict, durable=True)
    return 0


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def say(text: str) -> None:
    """A line in the job's log."""
    sys.stderr.write(f"{utc()} {key()}: {text}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m islandctl.fleet.slurm_batch CELL_FOLDER")
    sys.exit(batch(sys.argv[1]))
