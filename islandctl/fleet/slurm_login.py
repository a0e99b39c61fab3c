"""What happens on a Slurm cluster's login node. Standard library only, Python 3.8 or newer: its text is sent there by
slurm.py, behind that of supervisor.py, whose functions it uses.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from islandctl.fleet.supervisor import PREEMPTED, read_json, utc, write_json

COMMAND_TIMEOUT_S = 40.0
"""Slurm's commands answer within a second, or wait for a busy controller."""
LOOK_S = 0.5
QUEUE_S = 3.0
"""Between two questions to Slurm while something is waited for: its controller serves everybody."""
OWN_END_S = 15.0
"""For a job to end by itself, once its supervisors have."""


class NoAnswer(Exception):
    """Slurm's controller, or its commands, gave no answer."""


def command(argv: list[str], setup: list[str]) -> dict[str, Any]:
    """Run one of Slurm's commands behind the profile's shell lines; ``code`` None: it gave no answer in time."""
    own = ("SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    env.update(TZ="UTC", LC_ALL="C")
    whole = ["/bin/sh", "-c", "\n".join(setup) + '\nexec "$@"', "sh", *argv] if setup else argv
    try:
        done = subprocess.run(
            whole, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, env=env, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "out": "", "err": f"{argv[0]} gave no answer within {COMMAND_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"code": 127, "out": "", "err": f"{argv[0]}: {error.strerror} (PATH there: {env.get('PATH', '')})"}
    out, err = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
    return {"code": done.returncode, "out": out, "err": err.strip() or out.strip()}


def queue(setup: list[str], *options: str) -> list[list[str]]:
    """Jobs that wait or run: [id, state, nodes, name]."""
    told = command(["squeue", "--all", "--noheader", "--format=%i|%T|%N|%j", *options], setup)
    if told["code"] != 0:
        raise NoAnswer(told["err"])
    rows = [line.strip().split("|", 3) for line in told["out"].splitlines()]
    return [row for row in rows if len(row) == 4 and row[0][:1].isdigit()]


def commands(args: dict[str, Any], _: bytes) -> list[dict[str, Any]]:
    """Several commands, one after another; each answer as ``command`` gives it."""
    return [command(argv, args["setup"]) for argv in args["argvs"]]


def submit(args: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Write the job's script and hand it to sbatch. ``running``: the cell has a job already.

    The submission is written before sbatch is asked: a job that nobody was told of is found by its name.
    """
    cell, name, setup = args["cell_folder"], args["name"], args["setup"]
    try:
        there = queue(setup, f"--name={name}")
    except NoAnswer as error:
        return {"error": str(error), "unknown": True}
    if there:
        return {"running": there[0][0]}
    for node in args["nodes"]:
        os.makedirs(os.path.join(node, "logs"), exist_ok=True)
        for gone in ("exit.json", "stop", "state.json"):
            if os.path.exists(os.path.join(node, gone)):
                os.unlink(os.path.join(node, gone))
    submission = dict(args["submission"], login=addresses(), submitted=time.time())
    write_json(os.path.join(cell, "slurm.json"), submission, durable=True)
    script = os.path.join(cell, "job.sh")
    with open(script, "wb") as file:
        file.write(payload)
    with open(os.path.join(cell, "submission"), "w") as file:
        file.write(args["token"])
    told = command(["sbatch", "--parsable", *args["options"], script], setup)
    if told["code"] != 0:
        return {"error": told["err"], "unknown": told["code"] is None}
    found = submitted(told["out"])
    if found is None:
        return {"error": f"sbatch gave no job number: {told['out'][-300:]}"}
    write_json(os.path.join(cell, "slurm.json"), dict(submission, job=found), durable=True)
    return {"job": found}


def submitted(output: str) -> str | None:
    """A new job's number, beside whatever a site's plugins have sbatch print."""
    for line in reversed(output.splitlines()):
        found = re.fullmatch(r"(?:Submitted batch job )?(\d+)(?:;[\w.-]+| on cluster [\w.-]+)?", line.strip())
        if found:
            return found[1]
    return None


def addresses() -> list[str]:
    """This node's name, and every name and address under which others may know it; the likeliest first."""
    found = [socket.gethostname(), socket.getfqdn()]
    for target in ("192.0.2.1", "10.255.255.255"):  # no packet is sent: only the routing table is asked
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((target, 9))
                found.append(sock.getsockname()[0])
            except OSError:
                pass
    try:
        told = subprocess.run(["hostname", "-I"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        found += told.stdout.decode(errors="replace").split()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return list(dict.fromkeys(found))


def look(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """What lies in a cell's folder: its supervisors' states, the submission, the workers' last word, the log's."""
    nodes = []
    for folder in args["nodes"]:
        state, ended = (read_json(os.path.join(folder, name)) for name in ("state.json", "exit.json"))
        known = ("state", "restarts", "child_pid", "supervisor_pid", "since", "last", "node")
        answer = {key: (state or {}).get(key) for key in known}
        answer["state"] = answer["state"] or "absent"
        if state is not None:
            # a node whose clock is ahead must not seem to be alive for as long as that
            answer["beat_age_s"] = abs(time.time() - state.get("beat", 0.0))
        if ended is not None:
            told = ("outcome", "code", "signal", "kind", "rank", "reason", "restarts")
            answer.update({key: ended.get(key) for key in told})
            answer["state"] = "ended"
        elif answer["state"] == "ended":  # its last word has been taken away, to begin anew
            answer["state"] = "absent"
        nodes.append(answer)
    cell = args["cell_folder"]
    said = read_json(os.path.join(cell, "outcome.json")) or {}
    return {
        "nodes": nodes,
        "submission": read_json(os.path.join(cell, "slurm.json")),
        "finished": said.get("outcome") == "finished",
        "log": last_line(os.path.join(cell, "slurm.log")),
    }


def last_line(path: str) -> str:
    """The last line of a log; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def end(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Have the supervisors end their workers, cancel the job, and wait until Slurm has ended it.

    ``jobs``: what is left of it when the time is up; ``error``: Slurm gave no answer.
    """
    name, setup, folders = args["name"], args["setup"], args["nodes"]
    tell_to_stop(folders)
    deadline = time.monotonic() + args["given_s"]
    try:
        rows, asked, all_told = queue(setup, f"--name={name}"), time.monotonic(), False
        while rows and rows[0][1] in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
            if not any(os.path.exists(os.path.join(folder, "state.json")) for folder in folders):
                break  # no supervisor has begun: there is nothing to wait for
            tell_to_stop(folders)  # one that began just now has taken the switch for an old one
            if not all_told and all(os.path.exists(os.path.join(folder, "exit.json")) for folder in folders):
                all_told, deadline = True, min(deadline, time.monotonic() + OWN_END_S)
            time.sleep(LOOK_S)
            if time.monotonic() - asked > (LOOK_S if all_told else QUEUE_S):
                rows, asked = queue(setup, f"--name={name}"), time.monotonic()
        jobs = cancel(rows, setup, args["gone_s"], f"--name={name}")
    except NoAnswer as error:
        return {"error": str(error)}
    if jobs:
        return {"jobs": jobs}
    told = read_json(os.path.join(args["cell_folder"], "outcome.json")) or {}
    outcome = "finished" if told.get("outcome") == "finished" else "stopped"
    ran = os.path.exists(os.path.join(args["cell_folder"], "slurm.log"))
    reason = "its job was cancelled before it had ended by itself" if ran else "it was still in Slurm's queue"
    for folder in folders:
        path = os.path.join(folder, "exit.json")
        ended = read_json(path)
        if ended is not None and ended.get("kind") == PREEMPTED:  # nobody begins it again: its end stands
            write_json(path, dict(ended, kind=""), durable=True)
        elif os.path.isdir(folder) and ended is None:
            state = read_json(os.path.join(folder, "state.json")) or {}
            verdict = {"outcome": outcome, "code": None, "signal": None, "reason": reason, "at": utc()}
            write_json(path, dict(verdict, restarts=state.get("restarts", 0)), durable=True)
    return {"jobs": []}


def tell_to_stop(folders: list[str]) -> None:
    """Set the switch of every supervisor that has not ended."""
    for folder in folders:
        if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "exit.json")):
            open(os.path.join(folder, "stop"), "w").close()


def cancel(rows: list[list[str]], setup: list[str], gone_s: float, *which: str) -> list[list[str]]:
    """Cancel jobs and wait until squeue lists none any more; gives those that it still lists."""
    if rows:
        command(["scancel", *sorted({re.split(r"[_+;.]", row[0])[0] for row in rows})], setup)
    deadline, pause = time.monotonic() + gone_s, LOOK_S
    rows = queue(setup, *which) if rows else []
    while rows and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(QUEUE_S, pause * 1.5)
        rows = queue(setup, *which)
    return rows


def left(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """What is left of a run in Slurm: its jobs.

    ``cancel``: cancel them first, and wait until they are gone; then processes that its supervisors could not end, by
    their record, are told as well.
    """
    mark, setup, mine = args["mark"], args["setup"], f"--user={os.getuid()}"

    def ours() -> list[list[str]]:
        return [row for row in queue(setup, mine) if row[3].startswith(mark + ".")]

    try:
        rows = ours()
        if rows and args["cancel"]:
            cancel(rows, setup, args["gone_s"], f"--name={','.join(sorted({row[3] for row in rows}))}")
            rows = ours()
    except NoAnswer as error:
        return {"error": str(error)}
    root = os.path.join(os.path.abspath(os.path.expanduser(args["work_dir"])), "runs", mark)
    words = []
    for path in sorted(glob.glob(os.path.join(glob.escape(root), "*", "node-*", "exit.json"))):
        reason = str((read_json(path) or {}).get("reason") or "")
        if args["cancel"] and args["stubborn"] in reason:
            words.append(f"{os.path.relpath(os.path.dirname(path), root)}: {reason}")
    return {"jobs": rows, "processes": words}


def main(args: dict[str, Any], payload: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    functions = (commands, submit, look, end, left)
    return {function.__name__: function for function in functions}[args["do"]](args, payload)
