"""A cell as a job of Slurm, driven over SSH on the cluster's login node.

One job a cell, one task a node; each task is that node's supervisor (``slurm_node.py``), and keeps the workers as on
a plain host. Jobs are found by their name, which holds the run's mark: nothing has to be remembered here.
"""

from __future__ import annotations

import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from islandctl.config.site import SiteProfile
from islandctl.config.slurm import Slurm, partitions_of, sbatch_options
from islandctl.errors import PreflightError, RunError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorJob, SupervisorState
from islandctl.fleet.scheduler import Seat
from islandctl.fleet.slurm_text import (
    SACCT_FIELDS,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    Job,
    SlurmNode,
    newest,
    parse_sacct,
    parse_scontrol,
    parse_sinfo,
    parse_squeue,
)
from islandctl.fleet.slurm_verdict import UNSHARED, fresh, judge
from islandctl.fleet.wire import program

ASK_S = 10.0
"""Between two questions to Slurm about one job: its controller serves everybody, and a queue does not move faster."""
CALL_S = 60.0
GONE_S = 150.0
"""From scancel until Slurm has ended a job: TERM, KillWait (30 s usually), KILL, and the site's epilog."""
STUBBORN = "processes that would not end"
"""How a supervisor's exit record names them."""

_SCRIPT = """#!/bin/sh
# A cell of a run of islandctl. {unshared}: this node does not see what the login node has written.
cd {cell} 2>/dev/null && [ "$(cat submission)" = {token} ] || exit {unshared}
exec >>slurm.log 2>&1
ISLANDCTL_RUN={mark} PYTHONPATH={code} exec {python} -B -P -m islandctl.fleet.slurm_batch {cell}
"""


class SlurmJobs:
    """The cells of a Slurm site; see ``Scheduler``.

    Args:
        site: the profile.
    """

    as_one = True

    def __init__(self, site: SiteProfile) -> None:
        self._site = site
        self._setup = list(site.environment.setup)
        self._guard = threading.Lock()
        self._told: dict[str, tuple[float, Job | None]] = {}
        """By the job's name: when Slurm was last asked, and what it said."""
        self._stuck = False
        """Has a job outlived its end here? Then it is not waited for a second time."""

    def present(self, host: Host) -> str:
        """See ``Scheduler``. Slurm's controller is not asked."""
        needed = ("sbatch", "squeue", "scontrol", "scancel")
        for told in (answers := self._commands(host, *([name, "--version"] for name in needed))):
            if told["code"] != 0:
                raise PreflightError(
                    f"{host.label}: Slurm's commands are not there: {one_line(told['err'])}",
                    hint="environment.setup in the profile can put them on the PATH (module load slurm); on a site "
                    "without Slurm set scheduler: ssh",
                )
        return str(answers[0]["out"]).strip()

    def try_out(self, host: Host, num_nodes: int, ranks_per_node: int) -> str:
        """Have Slurm look at what the job of a cell would ask for; nothing is submitted. Gives its words.

        Raises:
            PreflightError: it would refuse the job.
            UnreachableError: it does not answer.
        """
        asked = sbatch_options(self._site, num_nodes, ranks_per_node)
        (told,) = self._commands(host, ["sbatch", "--test-only", *asked, "--wrap=true"])
        if told["code"] is None or "contact slurm controller" in told["err"].lower():
            raise UnreachableError(
                f"{host.label}: Slurm does not answer: {one_line(told['err'])}", hint="ask again when it does"
            )
        if told["code"] != 0:
            raise refused(host, asked, told["err"])
        return one_line(told["err"]).replace("sbatch: ", "")

    def nodes(self, host: Host) -> list[SlurmNode]:
        """The nodes of the partitions that a cell's job goes to, once for each; empty: sinfo tells of none.

        Raises:
            UnreachableError: Slurm does not answer.
        """
        partitions = partitions_of(self._site.slurm or Slurm())
        which = [f"--partition={partitions}"] if partitions else []
        (told,) = self._commands(host, ["sinfo", "--Node", "--noheader", f"--format={SINFO_FORMAT}", *which])
        if told["code"] is None or "contact slurm controller" in told["err"].lower():
            raise silent(host, told["err"])
        found = parse_sinfo(told["out"])
        return found if partitions else [node for node in found if node.usual]

    def address(self, seat: Seat) -> str:
        """None yet: Slurm chooses the nodes, and they find each other in the job."""
        return ""

    def start(self, seats: Sequence[Seat], jobs: Sequence[SupervisorJob]) -> str:
        """Hand the cell to Slurm. Its supervisors begin when it gets its nodes.

        Raises:
            RunError: the cell has a job already.
            PreflightError: sbatch refuses it.
            UnreachableError: Slurm does not answer; whether it has taken the job is not known.
        """
        host, cell, mark = seats[0].host, _cell(seats), jobs[0].mark
        files = {
            f"{PurePosixPath(seat.folder).name}/job.json": (job.model_dump_json(indent=1).encode(), 0o600)
            for seat, job in zip(seats, jobs, strict=True)
        }
        nodes.write_files(host, cell, files)
        name, token = _name(seats), secrets.token_hex(8)
        asked = sbatch_options(self._site, len(seats), seats[0].num_ranks)
        submission = {
            "name": name,
            "nodes": len(seats),
            "margin_s": (self._site.slurm or Slurm()).margin,
        }
        answer = self._login(
            host,
            "submit",
            self._script(cell, token, mark, seats[0]).encode(),
            cell_folder=cell,
            name=name,
            nodes=[seat.folder for seat in seats],
            options=[f"--job-name={name}", "--output=/dev/null", "--chdir=/", *asked],
            submission=submission,
            token=token,
        )
        self._forget(name)
        if "running" in answer:
            raise RunError(
                f"{host.label}: {jobs[0].name}: Slurm's job {answer['running']} of this cell is there already",
                hint=f"islandctl status {jobs[0].run}; or islandctl stop {jobs[0].run}",
            )
        if "error" in answer:
            if answer.get("unknown"):
                raise silent(host, answer["error"])
            raise refused(host, asked, answer["error"])
        return f"{host.label}: Slurm has its job {answer['job']}, which begins when there are nodes for it"

    def _script(self, cell: str, token: str, mark: str, seat: Seat) -> str:
        quoted = {"cell": cell, "token": token, "mark": mark, "code": seat.code, "python": seat.python}
        return _SCRIPT.format(unshared=UNSHARED, **{key: shlex.quote(value) for key, value in quoted.items()})

    def states(self, seats: Sequence[Seat]) -> list[SupervisorState]:
        """From the files of the cell, and where they do not suffice from Slurm; see ``slurm_verdict``."""
        host = seats[0].host
        seen, files = self._look(seats)
        if seen["submission"] is None or fresh(files):
            return files
        job = self._ask(host, seen["submission"])
        if job is None or job.phase == "ended":  # its last words may have come since they were looked for
            seen, files = self._look(seats)
        return judge(files, seen["submission"], job, bool(seen["finished"]), str(seen["log"]))

    def _look(self, seats: Sequence[Seat]) -> tuple[dict[str, Any], list[SupervisorState]]:
        """What lies in the cell's folder."""
        folders = [seat.folder for seat in seats]
        seen: dict[str, Any] = self._login(seats[0].host, "look", cell_folder=_cell(seats), nodes=folders)
        told = [{key: value for key, value in answer.items() if value is not None} for answer in seen["nodes"]]
        return seen, [SupervisorState(**answer) for answer in told]

    def _ask(self, host: Host, submission: dict[str, Any]) -> Job | None:
        """What Slurm says of a cell's job, asked anew now and then; None: it knows none."""
        name = submission["name"]
        with self._guard:
            at, job = self._told.get(name, (-ASK_S, None))
            if time.monotonic() - at >= ASK_S:
                job = self.find(host, submission)
                self._told[name] = (time.monotonic(), job)
            return job

    def find(self, host: Host, submission: dict[str, Any]) -> Job | None:
        """A submission's job: squeue, then scontrol, then sacct. Accounting may be off, and old jobs are forgotten.

        Args:
            submission: its ``name``; ``job``, its number, and ``submitted`` where they are known.

        Raises:
            UnreachableError: Slurm does not answer.
        """
        number = str(submission.get("job") or "")
        argv = [
            "squeue",
            "--all",
            "--noheader",
            "--states=all",
            f"--name={submission['name']}",
            f"--format={SQUEUE_FORMAT}",
        ]
        (told,) = self._commands(host, argv)
        if told["code"] != 0:
            raise silent(host, told["err"])
        jobs = [job for job in parse_squeue(told["out"]) if not number or job.id == number]
        found = newest(jobs)
        if found is not None and found.phase != "ended":
            return found
        number = number or (found.id if found else "")
        if not number:
            return found
        day = time.strftime("%Y-%m-%d", time.gmtime(float(submission.get("submitted", 0.0)) - 86400.0))
        of_job, of_books = self._commands(
            host,
            ["scontrol", "show", "job", "-o", number],
            ["sacct", "-n", "-P", "-X", "-j", number, "-S", day, "-o", SACCT_FIELDS],
        )
        # scontrol alone tells the exit code of a job that squeue lists as ended
        return parse_scontrol(of_job["out"]) or found or parse_sacct(of_books["out"], number)

    def stop(self, seats: Sequence[Seat], timeout_s: float) -> None:
        """The switch in every supervisor's folder, then scancel, and then Slurm's word that the job has ended."""
        host, name = seats[0].host, _name(seats)
        answer = self._login(
            host,
            "end",
            timeout_s=timeout_s + GONE_S + CALL_S,
            cell_folder=_cell(seats),
            nodes=[seat.folder for seat in seats],
            name=name,
            given_s=timeout_s,
            gone_s=GONE_S,
        )
        self._forget(name)
        if "error" in answer:
            raise silent(host, answer["error"])
        if answer["jobs"]:
            self._stuck = True
            number, state, where, _ = answer["jobs"][0]
            raise UnreachableError(
                f"{host.label}: Slurm's job {number} on {where} is {state} still, {GONE_S:.0f} s after scancel",
                hint=f"type there: scontrol show job {number}",
            )

    def left(self, host: Host, mark: str, *, end: bool) -> list[str]:
        """Jobs of the run in the queue, and what its supervisors could not end."""
        answer = self._login(
            host,
            "left",
            timeout_s=GONE_S + CALL_S,
            mark=mark,
            work_dir=self._site.work_dir,
            cancel=end,
            gone_s=0.0 if self._stuck else GONE_S,
            stubborn=STUBBORN,
        )
        if "error" in answer:
            raise silent(host, answer["error"])
        jobs = [f"Slurm's job {number} ({state}) {where}".rstrip() for number, state, where, _ in answer["jobs"]]
        return [*jobs, *answer["processes"]]

    def _forget(self, name: str) -> None:
        with self._guard:
            self._told.pop(name, None)

    def _commands(self, host: Host, *argvs: list[str]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._login(host, "commands", timeout_s=3 * CALL_S, argvs=list(argvs))
        return told

    def _login(self, host: Host, do: str, payload: bytes = b"", timeout_s: float = 2 * CALL_S, **args: Any) -> Any:
        asked = {"do": do, "setup": self._setup, **args}
        return host.python(program("supervisor", "slurm_login"), asked, timeout_s=timeout_s, payload=payload)


def _cell(seats: Sequence[Seat]) -> str:
    """The cell's folder."""
    return str(PurePosixPath(seats[0].folder).parent)


def _name(seats: Sequence[Seat]) -> str:
    """The job's name: ``<mark>.<cell>``, as the cell's folder ends in ``<mark>/<cell>``."""
    return ".".join(PurePosixPath(seats[0].folder).parts[-3:-1])


def refused(host: Host, asked: Sequence[str], said: str) -> PreflightError:
    return PreflightError(
        f"{host.label}: sbatch {shlex.join(asked)}: {one_line(said)}",
        hint="correct the section slurm of the site profile; sinfo and sacctmgr there show what there is",
    )


def silent(host: Host, said: str) -> UnreachableError:
    return UnreachableError(
        f"{host.label}: Slurm does not answer: {one_line(said)}; the state of its jobs is unknown",
        hint="again when it does; training is not affected. If its commands are not on the PATH there, "
        "environment.setup can put them on it",
    )


def one_line(text: str) -> str:
    """A command's complaint in one line, without the name that it puts in front of each."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-4:]) or "no word"
