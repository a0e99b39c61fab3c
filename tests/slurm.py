"""A real Slurm on this machine, for tests: munged, slurmctld, three slurmd, with their own ports, keys and folders.

    with cluster(folder) as slurm:
        slurm.run("sinfo")

Nothing outside ``folder`` is written, and nothing but loopback is listened on. No cgroups, no accounting, no systemd.
The partition ``low`` gives way to ``high`` after a grace time, and its jobs are then queued again; ``apart`` has a
node of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
NODES = ("n1", "n2", "n3")
TRIES = 3
_PATH = "/usr/sbin:/usr/local/sbin:/sbin"

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
KillWait=30
MessageTimeout=60
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 State=UP PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=n1,n2 PriorityTier=10 State=UP PreemptMode=OFF
PartitionName=apart Nodes=n3 State=UP PreemptMode=OFF
"""


def programs() -> dict[str, str]:
    """Where the programs are; an error, not a skip, where one is missing."""
    found = {name: shutil.which(name) or shutil.which(name, path=_PATH) for name in PROGRAMS}
    if missing := [name for name, path in found.items() if path is None]:
        raise RuntimeError(f"these tests need a Slurm: {', '.join(missing)} missing; scripts/setup-slurm installs it")
    return {name: path for name, path in found.items() if path}


class Cluster:
    """One Slurm.

    Args:
        folder: all that it writes lies below.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._root = folder
        self._programs = programs()
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        """What its commands need in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Begin the daemons, and wait until the nodes are there. Anew, where somebody has taken one of the ports."""
        for number in range(TRIES):
            self.folder = self._root / str(number)
            try:
                self._start()
            except RuntimeError:
                self._end()
                if number == TRIES - 1:
                    raise
            else:
                return

    def _start(self) -> None:
        for name in ("munge", "state", *(f"spool-{name}" for name in NODES)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ctld, *ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        ]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        facts = {"host": host, "ctld": ctld, "user": user, "folder": self.folder, "nodes": "\n".join(lines)}
        (self.folder / "slurm.conf").write_text(_CONF.format(**facts))
        munge = self.folder / "munge"
        # --force: munged wants its socket's folder open to all, and a test's folder is not
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        files.append(f"--socket={munge / 'socket'}")
        self._begin("munged", "--foreground", "--force", "--num-threads=4", *files)
        self._until(lambda: (munge / "socket").exists(), "munged")
        self._begin("slurmctld", "-D")
        for name in NODES:
            self._begin("slurmd", "-D", "-N", name)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 5, "the nodes")

    def _begin(self, name: str, *options: str, within: Sequence[str] = ()) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*within, self._programs[name], *options],
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def restart(self, node: str, *within: str) -> None:
        """End a node's slurmd and begin it anew, inside a command that runs what follows (``unshare …``)."""
        before = self._started(node)
        known = [daemon for daemon in self._daemons if daemon.args[-2:] == ["-N", node]]  # type: ignore[index]
        for daemon in known:
            self._daemons.remove(daemon)
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        time.sleep(1.1)  # two starts within a second would look like one
        self._begin("slurmd", "-D", "-N", node, within=within)
        self._until(lambda: self._started(node) not in (before, "None"), node)

    def _started(self, node: str) -> str:
        """When its slurmd began, in whole seconds, as the controller knows."""
        told = self.run("scontrol", "show", "node", node)
        return told.partition("SlurmdStartTime=")[2].split()[0]

    def _until(self, good: object, what: str) -> None:
        assert callable(good)
        deadline = time.monotonic() + 60
        while not good():
            gone = [one.args for one in self._daemons if one.poll() is not None]
            if gone or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))
                outs = "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.out"))
                raise RuntimeError(f"Slurm did not start ({what}; ended: {gone}):\n{outs}\n{logs}")
            time.sleep(0.05)

    def run(self, *argv: str) -> str:
        """One of Slurm's commands; what it prints, also where it fails."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env, "TZ": "UTC"}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def occupy(self, seconds: int) -> str:
        """Have a job of ``high`` take both nodes of ``low``; its number."""
        asked = ["--nodes=2", "--exclusive", "--partition=high", "--output=/dev/null", f"--wrap=sleep {seconds}"]
        return self.run("sbatch", "--parsable", *asked).strip()

    def close(self) -> None:
        """Cancel all jobs, and end the daemons."""
        if self._daemons:
            self.run("scancel", f"--user={os.getuid()}")
            deadline = time.monotonic() + 45
            while self.run("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
        self._end()

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(daemon.pid, number)
                    daemon.wait(timeout=5)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        self._daemons.clear()


def _free_ports(number: int) -> list[int]:
    held = [socket.socket() for _ in range(number)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm that ends with the block."""
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
