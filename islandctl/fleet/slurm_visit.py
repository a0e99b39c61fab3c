"""A visit: one short job of Slurm, so that a site's nodes can be asked like hosts while it lasts.

On every node a Python stays, as on a host over SSH (``interpreter.py``). Only the way to it is another: what is asked
goes to the login node, from there through files of the shared work folder to the node, and back
(``slurm_visit_login.py``, ``slurm_visit_node.py``).

The job ends with ``end``. Where nobody is left to call that, it ends by itself: on the nodes when nobody has asked
for two minutes, in the queue when it could not be through by its deadline (``sbatch --deadline``).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from islandctl.config.site import SiteProfile
from islandctl.config.slurm import sbatch_options
from islandctl.errors import IslandError, PreflightError, UnreachableError
from islandctl.fleet import wire
from islandctl.fleet.host import Host
from islandctl.fleet.slurm import SlurmJobs, one_line, refused, silent
from islandctl.fleet.slurm_text import Job
from islandctl.fleet.slurm_verdict import UNSHARED, ended_words, hopeless, waits
from islandctl.fleet.slurm_visit_host import Mail, NodeOfJob

NAME = "visit"
"""Of the job, behind the run's mark; and of its folder."""
BEGIN_S = 120.0
"""From a job that runs to the first word of its script: a prolog, and a shared file system that shows it late."""
SLACK_S = 120.0
"""Over waiting and running, until Slurm takes a job that nobody has cancelled out of the queue."""
ASK_S = 10.0
LOST_S = 90.0
"""So long the login node may be out of reach."""
LISTEN_S = 0.4
UNWRITABLE = 77
"""How the job's script ends where its first node cannot write into the folder."""
SHARED = "work_dir must lie on a file system that the login node and all nodes share and can write to"

_SCRIPT = f"""#!/bin/sh
# islandctl's doctor examines the nodes of this job. {UNSHARED}: the first of them does not see what the login node
# has written; {UNWRITABLE}: it cannot write there. A step a node: one that cannot begin keeps no other from it.
folder=$1 token=$2 python=$4 boot=$5 over=$6
export ISLANDCTL_RUN="$3"
cd "$folder" 2>/dev/null && [ "$(cat submission)" = "$token" ] || exit {UNSHARED}
(: >>visit.log) 2>/dev/null || exit {UNWRITABLE}
exec >>visit.log 2>&1
scontrol show hostnames "$SLURM_JOB_NODELIST" >nodes || exit 1
number=0
while read -r name; do
  {{
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$name" \\
      ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} --mpi=none --cpu-bind=none \\
      --export=ALL --input=none --quiet \\
      "$python" -I "$folder/slurm_visit_node.py" "$folder" "$number" "$boot" 2>&1 </dev/null | sed "s/^/$number: /"
    echo "$number: $over"
  }} &
  number=$((number + 1))
done <nodes
wait
"""


class Visit:
    """The nodes of one site for a while.

    Args:
        site: its profile.
        host: its login node.
        scheduler: the site's.
        mark: of the run whose job this is.
        folder: for the job's files, below the work folder; ``~`` is the home there.
    """

    def __init__(self, site: SiteProfile, host: Host, scheduler: SlurmJobs, mark: str, folder: str) -> None:
        self._site, self._host, self._scheduler = site, host, scheduler
        self._mark, self._folder = mark, folder
        self._job: dict[str, Any] = {"name": f"{mark}.{NAME}"}
        self._log = _Log()
        self._mails = [Mail() for _ in range(site.num_nodes)]
        self._names: list[str] = []
        self._over = threading.Event()
        self._submitting = threading.Lock()
        self.login: tuple[str, ...] = ()
        """Names and addresses of the login node, as the nodes may know it."""

    @property
    def job(self) -> str:
        """Slurm's number; empty: there is none yet."""
        return str(self._job.get("job", ""))

    def begin(self, *, limit_s: float, wait_s: float) -> None:
        """Submit the job.

        Args:
            limit_s: its time limit.
            wait_s: how long it may wait for nodes.

        Raises:
            PreflightError: sbatch refuses it, or nothing can be written there.
            UnreachableError: Slurm or the login node gives no answer.
        """
        token = secrets.token_hex(8)
        asked = sbatch_options(self._site, self._site.num_nodes, self._site.ranks_per_node, limit_s=limit_s)
        with self._submitting:
            if self._over.is_set():
                raise UnreachableError(f"{self._host.label}: the examination is over")
            answer = self._submit(asked, token, limit_s + wait_s)
        self._folder, self.login = answer["folder"], tuple(answer["login"])
        if "error" in answer:
            if answer.get("unknown"):
                raise silent(self._host, answer["error"])
            raise refused(self._host, asked, answer["error"])
        self._job.update(job=answer["job"], submitted=time.time())

    def _submit(self, asked: Sequence[str], token: str, span_s: float) -> Any:
        here, python = Path(__file__).parent, self._site.environment.python
        return self._ask(
            "begin",
            _SCRIPT.encode(),
            setup=list(self._site.environment.setup),
            folder=self._folder,
            files={
                "submission": token,
                "slurm_visit_node.py": (here / "slurm_visit_node.py").read_text(encoding="utf-8"),
                "islandctl/fleet/porch.py": (here / "porch.py").read_text(encoding="utf-8"),
            },
            nodes=self._site.num_nodes,
            options=[
                f"--job-name={self._job['name']}",
                "--output=/dev/null",
                "--chdir=/",
                *asked,
                f"--deadline=now+{round(span_s + SLACK_S)}seconds",
            ],
            token=token,
            mark=self._mark,
            python=python if "/" in python else "python3",  # as over SSH: a name may need the profile's set-up lines
            boot=wire.BOOT,
            over=self._log.over,
        )

    def pending(self) -> str:
        """Why the job waits, in Slurm's words; empty: it has begun.

        Raises:
            PreflightError: it has ended, or waits for what will never come.
            UnreachableError: Slurm gives no answer.
        """
        job = self._scheduler.find(self._host, self._job)
        if job is None:
            raise PreflightError(f"{self._host.label}: Slurm does not know its job {self.job} any more")
        if job.phase == "ended":
            raise self._ended(job)
        if hopeless(job):
            raise PreflightError(
                f"{self._host.label}: {waits(job, {})}", hint="correct the section slurm of the site profile"
            )
        return waits(job, {}) if job.phase in ("waiting", "unknown") else ""

    def hosts(self) -> list[NodeOfJob]:
        """The job's nodes, once it has begun, in the order of Slurm's list.

        Raises:
            PreflightError: its script does not get as far as the nodes.
            UnreachableError: it says nothing, or cannot be reached.
        """
        threading.Thread(target=self._carry, daemon=True, name=f"visit {self._site.name}").start()
        end = time.monotonic() + BEGIN_S
        while len(self._names) < len(self._mails):
            if self._mails[0].why:
                raise self._mails[0].why
            if time.monotonic() > end:
                said = f": {self._log.last}" if self._log.last else ""
                raise UnreachableError(
                    f"{self._host.label}: Slurm's job {self.job} runs, and says nothing for {BEGIN_S:.0f} s{said}",
                    hint=SHARED,
                )
            time.sleep(LISTEN_S)
        return [
            NodeOfJob(f"{self._site.name}/{name}", name, self.job, mail)
            for name, mail in zip(self._names, self._mails, strict=False)
        ]

    def close(self) -> None:
        """Submit nothing and ask nothing any more. What is being submitted just now is waited for."""
        self._over.set()
        self._end_mails(UnreachableError(f"{self._host.label}: the examination is over"))
        with self._submitting:
            return

    def end(self) -> list[str]:
        """Cancel the job, and wait until it is gone. Gives what is left of it.

        Raises:
            UnreachableError: Slurm or the login node gives no answer.
        """
        self.close()
        return self._scheduler.left(self._host, self._mark, end=True)

    def _carry(self) -> None:
        """Carry mail until the visit is over, the job has ended, or the login node is out of reach for long."""
        beats, heard, asked = itertools.count(1), time.monotonic(), time.monotonic()
        try:
            while not self._over.is_set():
                try:
                    self._exchange(next(beats))
                    if time.monotonic() - asked > ASK_S:
                        asked = time.monotonic()
                        if (ended := self._look()) is not None:
                            return self._end_mails(ended)
                    heard = time.monotonic()
                except UnreachableError:
                    if time.monotonic() - heard > LOST_S:
                        raise
                    self._over.wait(1.0)
        except IslandError as error:
            self._end_mails(error)

    def _end_mails(self, why: IslandError) -> None:
        for mail in self._mails:
            mail.end(why)

    def _exchange(self, beat: int) -> None:
        """One round trip: what waits goes out, what has come is handed over."""
        send = {str(at): mail.waiting for at, mail in enumerate(self._mails) if mail.waiting[1] and not mail.why}
        told = self._ask(
            "carry",
            folder=self._folder,
            beat=beat,
            send={node: [offset, base64.b64encode(data).decode()] for node, (offset, data) in send.items()},
            at={str(at): mail.received for at, mail in enumerate(self._mails) if not mail.why},
            log=self._log.read,
            wait_s=LISTEN_S,
        )
        for node, (offset, data) in send.items():
            self._mails[int(node)].sent(offset + len(data))
        for node, packed in told["came"].items():
            self._mails[int(node)].deliver(base64.b64decode(packed))
        self._names = told["nodes"]
        for number, said in self._log.add(base64.b64decode(told["log"])).items():
            if number < len(self._mails):
                self._mails[number].end(self._lost(number, said))

    def _lost(self, number: int, said: str) -> IslandError:
        """The error of a node whose Python has ended: a run there would fare no better, if it never came up."""
        name = self._names[number] if number < len(self._names) else f"node {number}"
        label, told = f"{self._site.name}/{name}", re.sub(r"^\S+: error: ", "", said)
        if self._mails[number].received:
            return UnreachableError(f"{label}: {told or 'it has left the job without a word'}")
        hint = "environment.python must be there on every node" if "execve" in told else SHARED
        return PreflightError(f"{label}: {told or 'nothing begins there'}", hint=hint)

    def _look(self) -> IslandError | None:
        """Does the job still run? The error of one that has ended; of nodes that did answer nothing bad is known."""
        job = None
        with contextlib.suppress(UnreachableError):  # Slurm may be busy: its nodes answer all the same
            job = self._scheduler.find(self._host, self._job)
        if job is None or job.phase != "ended":
            return None
        error = self._ended(job)
        if not any(mail.received for mail in self._mails):
            return error
        return UnreachableError(f"{error.message}; what was asked is unknown", hint="islandctl doctor again")

    def _ended(self, job: Job) -> PreflightError:
        who = f"{self._host.label}: Slurm's job {job.id}"
        if job.exit_code.partition(":")[0] == str(UNWRITABLE):
            where = f"{self._site.name}/{first_of(job.nodes)}: cannot write into {self._folder}"
            return PreflightError(
                f"{where}; it is the first node of Slurm's job {job.id}, so no other could be asked", hint=SHARED
            )
        said = ended_words(job, who, self._log.last)
        return PreflightError(said, hint="" if SHARED in said else "islandctl doctor again, or read Slurm's own log")

    def _ask(self, do: str, payload: bytes = b"", **args: Any) -> Any:
        source = wire.program("supervisor", "slurm_login", "slurm_visit_login")
        return self._host.python(source, {"do": do, **args}, timeout_s=60.0, payload=payload)


def first_of(nodes: str) -> str:
    """The first name of a list as Slurm writes it: of ``n[01-04,7],m1`` it is ``n01``."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


class _Log:
    """The job's log: lines of nodes carry their number."""

    def __init__(self) -> None:
        self.over = f"<<{secrets.token_hex(8)}>>"
        """Stands on the last line of a node."""
        self.read = 0
        """Bytes so far."""
        self.last = ""
        """The last line that says something."""
        self._rest = b""
        self._said: dict[int, str] = {}

    def add(self, data: bytes) -> dict[int, str]:
        """More of it. Gives the nodes that have ended, each with its last words."""
        self.read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        ended: dict[int, str] = {}
        for line in lines:
            text = line.decode(errors="replace").strip()
            found = re.fullmatch(r"(\d+): (.*)", text)
            if found is None:
                self.last = text or self.last
            elif found[2] == self.over:
                ended[int(found[1])] = self._said.get(int(found[1]), "")
            elif not re.search(r"error: .*task 0: (Exited with exit code|Terminated)|[Jj]ob step", found[2]):
                self._said[int(found[1])] = self.last = one_line(found[2])
        return ended
