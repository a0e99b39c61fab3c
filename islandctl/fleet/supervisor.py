"""The supervisor: keeps one child alive on a node, outlives the SSH link, and tells how it ended by files.

One file, standard library only, Python 3.8 or newer, Linux. It is copied to the node and run there:

    python supervisor.py start FOLDER    begin in the background; returns at once; refused while one lives
    python supervisor.py keep FOLDER     the loop itself (what ``start`` begins)

The files in FOLDER are described in docs/architecture.md. The functions ``states``, ``leftovers``, ``remains`` and
``end_marked`` are also sent to a node as they are (see ``node.py``), so that there is one authority on what runs.

In order: processes; the machine (ports, memory, accelerators); files; why a child ended; children that hang; the
loop; commands.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

POLL_S = 0.2
"""How soon a child's end or the stop switch is seen."""
BEAT_S = 2.0
"""How often state.json is written anew while nothing changes."""
START_TIMEOUT_S = 10.0
CRASH_GRACE_S = 10.0
RESERVED, RESERVED_BYTES = ".reserved", 16 << 10
"""Enough for the longest reason of an end, each of its letters escaped."""
BY_BUDGET = "stopped by budget"
BUDGET_GRACE_S = 900.0
"""Between asking the child to end, since the budget is used up, and ending it: cells end together at one step."""
MARK, JOB, LIFE, LOG = "ISLANDCTL_RUN", "ISLANDCTL_JOB", "ISLANDCTL_LIFE", "ISLANDCTL_LOG"
ASKED = "asked to stop"
LIVE = ("starting", "running", "backoff", "stopping")
CRASH, MEMORY, HUNG, PEER_LOST = "crash", "out-of-memory", "hung", "peer-lost"
PREEMPTED, NODE_LOST = "preempted", "node-lost"
"""Why a child ended though nobody had asked it to. The last two are not its fault, and not counted as failures."""
MEMORY_ENDS = 2
"""Ends for lack of memory without progress in between: what needs too much at one step does so every time."""
PORT_PATIENCE_S = 10.0
"""How long a port that must be free is waited for: what held it may be about to end."""
LOOK_S = 2.0
"""How often the watchdog looks."""
SLOW_WORK = 6.0
"""Starting, evaluating and checkpointing may take so many times longer than a step before they count as hung."""
DUMP_S = 20.0
LOG_BYTES = 64 << 20
"""From this size on a life of the child begins a new piece of its log. One of our programs, which finds the log in
its environment, does so by itself while it runs: what has the file open need not outlive us, nor we it."""
LOG_PIECES = 4
"""So many are kept."""
CGROUPS = "/sys/fs/cgroup"


# Processes ------------------------------------------------------------------------------------------------------


def boot_id() -> str:
    """Changes at every boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name (index 0 is the state), or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def birth(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; with the pid it names one process for good.

    None if there is none, or only a zombie.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _environ(pid: int) -> dict[str, str]:
    """The environment that the process began with; empty for other users' processes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().split(b"\0")
    except OSError:
        return {}
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in (pair.partition(b"=") for pair in pairs)}


def _own_line() -> list[int]:
    """This process and its ancestors: never to be ended by itself."""
    pid, line = os.getpid(), []
    while pid > 1:
        line.append(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return line


def marked(mark: str, job: str | None = None) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Processes of the run ``mark`` (and of one job of it), whatever their session: (pid, birth, environment)."""
    own = _own_line()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in own:
            continue
        born = birth(int(name))
        environ = _environ(int(name))
        if born is not None and environ.get(MARK) == mark and (job is None or environ.get(JOB) == job):
            yield int(name), born, environ


def command_of(pid: int) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsdecode(file.read().replace(b"\0", b" ")).strip()[:400]
    except OSError:
        return ""


def leftovers(mark: str) -> list[dict[str, Any]]:
    """Every process of the run on this machine: pid, command, job."""
    found = [(pid, command_of(pid), environ.get(JOB, "")) for pid, _, environ in marked(mark)]
    return [{"pid": pid, "command": command, "job": job} for pid, command, job in found if command]


def _kill(pid: int, born: int, number: int) -> None:
    """Signal exactly the process that was seen: a pid that has been given to another process is left alone."""
    if birth(pid) == born:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end_marked(mark: str, job: str | None, timeout_s: float, spare: tuple[int, ...] = ()) -> list[int]:
    """TERM every process of the job, wait, KILL what remains. Returns pids that would not die."""
    deadline = time.monotonic() + timeout_s
    warned = set()
    while True:
        alive = [(pid, born) for pid, born, _ in marked(mark, job) if pid not in spare]
        if not alive:
            return []
        late = time.monotonic() > deadline
        for pid, born in alive:
            if late or (pid, born) not in warned:
                _kill(pid, born, signal.SIGKILL if late else signal.SIGTERM)
                warned.add((pid, born))
        if time.monotonic() > deadline + 10:
            return [pid for pid, _ in alive]
        time.sleep(0.05)


# The machine ----------------------------------------------------------------------------------------------------


def listeners(ports: list[int]) -> list[tuple[int, int | None]]:
    """Who listens on these TCP ports, at whatever address: (port, pid); None: another user's process."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for fields in (line.split() for line in file.readlines()[1:]):
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == "0A" and port in ports:
                    inodes[f"socket:[{fields[9]}]"] = port
    found: dict[int, int | None] = dict.fromkeys(inodes.values())
    for pid in (int(name) for name in os.listdir("/proc") if inodes and name.isdigit()):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held = inodes.get(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
                    if held is not None:
                        found[held] = pid
    return sorted(found.items())


def taken(address: str, port: int) -> str:
    """Why one cannot listen on the port at the address, and who holds it; empty: one can, it was tried.

    At all addresses as well, since that is where torch's store listens.
    """
    try:
        for place in (address, ""):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever listens there will do
                probe.bind((place, port))
                probe.listen(1)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"cannot listen at {address} port {port}: {error.strerror}"
        return f"port {port} is held by {' and '.join(map(_holder, listeners([port]))) or 'nobody visible'}"
    return ""


def _holder(found: tuple[int, int | None]) -> str:
    pid = found[1]
    return "another user's process" if pid is None else f"process {pid} ({command_of(pid)})"


def memory_kills() -> tuple[str, int] | None:
    """How many processes the kernel has killed for lack of memory: in our own cgroup, else on the whole machine.

    With the file that says so. None: this kernel does not tell.
    """
    files = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file.read().splitlines():
            number, controllers, path = line.split(":", 2)
            for inside in (path.rstrip("/"), ""):  # a container may see its own cgroup as the root
                if number == "0":
                    files.append(f"{CGROUPS}{inside}/memory.events")
                elif "memory" in controllers.split(","):
                    files.append(f"{CGROUPS}/memory{inside}/memory.oom_control")
    for name in [*files, "/proc/vmstat"]:
        with contextlib.suppress(OSError, ValueError), open(name) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return name, int(line.split()[1])
    return None


def accelerators(patience_s: float = 10.0) -> dict[str, Any] | None:
    """The NVIDIA accelerators here, and what holds memory on them; None: there is no accelerator here.

    Waits while memory is held by nobody visible: a driver takes a moment to clear up after a killed process.

    Returns:
        ``num``, and ``held``: one text for each accelerator of which memory is in use, or for what went wrong.
    """
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    end = time.monotonic() + patience_s
    while True:
        try:
            cards = _ask([smi, "--query-gpu=uuid,index,memory.used", "--format=csv,noheader,nounits"])
            users = _ask([smi, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"])
            held, hidden = card_memory(cards, users)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {"num": 0, "held": [f"nvidia-smi does not tell: {error}"]}
        if not hidden or time.monotonic() > end:
            return {"num": len(cards), "held": held}
        time.sleep(0.5)


IDLE_MIB = 1024
"""What a driver keeps for itself on an accelerator that nobody uses stays below this."""


def card_memory(cards: list[str], users: list[str]) -> tuple[list[str], bool]:
    """What ``nvidia-smi`` says of memory in use, a text for each such card; and whether some is held by nobody seen.

    Args:
        cards: lines ``uuid, index, MiB in use``.
        users: lines ``uuid of the card, pid``.
    """
    holders: dict[str, list[int]] = {}
    for uuid, pid in (line.split(",")[:2] for line in users):
        holders.setdefault(uuid.strip(), []).append(int(pid))
    held, hidden = [], False
    for uuid, index, used in (line.split(",")[:3] for line in cards):
        if not used.strip().isdigit():
            held.append(f"accelerator {index.strip()}: memory in use is not told ({used.strip()})")
            continue
        seen = [(pid, command_of(pid)) for pid in holders.get(uuid.strip(), ())]
        names = [f"process {pid} ({command or 'not visible here'})" for pid, command in seen]
        if names or int(used) >= IDLE_MIB:
            who = ", ".join(names) or "no process that is visible here"
            held.append(f"accelerator {index.strip()}: {int(used)} MiB in use by {who}")
            hidden |= not any(command for _, command in seen)
    return held, hidden


def _ask(argv: list[str]) -> list[str]:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=True)
    return [line for line in done.stdout.splitlines() if line.strip()]


def remains(mark: str, folders: list[str], ports: list[int], patience_s: float = 3.0) -> dict[str, Any]:
    """What is left of the run here: processes, listeners on its ports, and what holds accelerators' memory.

    Args:
        folders: of the workers' supervisors, whose jobs tell more ports; none: nobody used accelerators here.
        patience_s: for ports that the far end of a tunnel, or a process that ends, still holds.
    """
    jobs = [read_json(os.path.join(folder, "job.json")) or {} for folder in folders]
    asked = sorted({*ports, *(int(port) for job in jobs for _, port in job.get("binds") or ())})
    found, end = leftovers(mark), time.monotonic() + patience_s
    while not found and listeners(asked) and time.monotonic() < end:
        time.sleep(0.1)
    return {
        "processes": found,
        "ports": asked,
        "taken": [f"port {one[0]} is held by {_holder(one)}" for one in listeners(asked)],
        "accelerators": accelerators() if folders and not found else None,
    }


# Files ----------------------------------------------------------------------------------------------------------


def read_json(path: str) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file or it holds none."""
    for _ in range(2):  # who has opened a file, and reads it only two writings later, may meet the second one
        try:
            with open(path) as file:
                value = json.load(file)
        except OSError:
            return None
        except ValueError:
            continue
        return value if isinstance(value, dict) else None
    return None


def reserve(path: str) -> None:
    """Hold space for one ``write_json`` of this path, so that a disk that fills up cannot swallow the word."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path + RESERVED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with open(descriptor, "wb", buffering=0) as file:
            missing = RESERVED_BYTES - os.fstat(descriptor).st_size
            if missing > 0:
                file.write(b" " * missing)
                os.fsync(descriptor)


def write_json(path: str, value: dict[str, Any], durable: bool = False, hold: bool = False) -> None:
    """Replace the file in one step; ``durable``: it also survives a power cut. Takes the space held for it first.

    ``hold``: the file that was replaced holds the space for the next time, so that a full disk stops none of them.
    """
    aside = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        os.rename(path + RESERVED, aside)
        if os.path.samefile(aside, path):  # somebody was killed between the link and the replacement below
            os.unlink(aside)
    data = json.dumps(value, indent=1).encode() + b"\n"
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
        file.write(data.ljust(os.fstat(file.fileno()).st_size))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if hold:
        with contextlib.suppress(OSError):  # there is no file yet, or the file system knows no links
            os.link(path, path + RESERVED)
    os.replace(aside, path)
    if hold:
        reserve(path)


def no_room(folder: str) -> str:
    """What is to be said where a disk is full: there a child's last word is lost, and its log's last lines."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < RESERVED_BYTES:
            return f"; it left no word: the disk of {folder} is full"
    return ""


def append_line(descriptor: int, line: str) -> None:
    """One more line of a log, whole; on a full disk it is lost whole."""
    data = line.encode(errors="replace") + b"\n"
    with contextlib.suppress(OSError):
        written = os.write(descriptor, data)
        if written < len(data):  # where the disk ends, the beginning of a line is written without an error
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)


def _signature(path: str | None) -> list[int] | None:
    """Tells one writing of a file from another, without trusting anybody's clock."""
    try:
        found = os.stat(path or "")
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def furthest(path: str | None) -> tuple[int, int]:
    """The highest (attempt, step) in the last lines of a file of JSON lines; (0, 0): none.

    A child that always fails at the same step writes the same steps again and again: only a new one is progress.
    """
    best = (0, 0)
    try:
        with open(path or "", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (256 << 10)))
            lines = file.read().splitlines()
    except OSError:
        return best
    for line in lines:
        try:
            said = json.loads(line)
            best = max(best, (int(said["attempt"]), int(said["step"])))
        except (ValueError, TypeError, LookupError):
            continue  # torn, or begun before the part that was read
    return best


def pieces(base: str) -> list[tuple[int, str]]:
    """The pieces of a log on disk, the oldest first: ``BASE.log`` is number 0, ``BASE.1.log`` the next one."""
    fits = re.compile(re.escape(base) + r"(?:\.(\d+))?\.log")
    found = [fits.fullmatch(name) for name in glob.glob(glob.escape(base) + "*.log")]
    return sorted((int(one[1] or 0), one[0]) for one in found if one)


def utc() -> str:
    """Now, as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def lives(state: dict[str, Any] | None) -> bool:
    """Does the supervisor that wrote this state still run?"""
    return bool(
        state
        and state.get("boot_id") == boot_id()
        and birth(state["supervisor_pid"]) is not None
        and birth(state["supervisor_pid"]) == state.get("supervisor_birth")
    )


def loss(state: dict[str, Any]) -> str:
    """Why the supervisor that wrote this state is lost."""
    return "the node was rebooted" if state.get("boot_id") != boot_id() else "the supervisor was killed"


def loss_kind(state: dict[str, Any]) -> str:
    """The same in a word."""
    return NODE_LOST if state.get("boot_id") != boot_id() else CRASH


def budget_left_s(folder: str) -> float | None:
    """What is left of the budget of the job kept in ``folder``; None: it has none."""
    budget = (read_json(os.path.join(folder, "job.json")) or {}).get("budget_s")
    used = (read_json(os.path.join(folder, "used.json")) or {}).get("seconds", 0.0)
    return None if budget is None else max(0.0, float(budget) - float(used))


def states(folders: list[str]) -> list[dict[str, Any]]:
    """What the supervisors of these folders do; the keys are those of ``SupervisorState``."""
    answers: list[dict[str, Any]] = []
    for folder in folders:
        state = read_json(os.path.join(folder, "state.json"))
        if state is None:
            answers.append({"state": "absent"})
            continue
        answer: dict[str, Any] = {
            key: state.get(key)
            for key in ("state", "restarts", "child_pid", "supervisor_pid", "since", "last", "last_kind")
        }
        answer["beat_age_s"] = max(0.0, time.time() - state.get("beat", 0.0))
        answer["budget_left_s"] = budget_left_s(folder)
        if state["state"] in LIVE and not lives(state):
            # Its last word counts, also where a full disk left no room to tell the state after it.
            answer["state"] = "ended" if os.path.exists(os.path.join(folder, "exit.json")) else "lost"
            answer["reason"], answer["kind"] = loss(state), loss_kind(state)
            job = read_json(os.path.join(folder, "job.json")) or {}
            rest = marked(job["mark"], job["name"]) if "mark" in job else ()
            answer["orphans"] = any(LIFE in environ for _, _, environ in rest)  # the next supervisor has none
        ended = read_json(os.path.join(folder, "exit.json")) if answer["state"] == "ended" else None
        if ended:
            told = ("outcome", "code", "signal", "kind", "rank", "reason", "restarts")
            answer.update({key: ended.get(key) for key in told})
        answers.append(answer)
    return answers


# Why a child ended ----------------------------------------------------------------------------------------------

CULPRITS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def first_to_fail(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that took the others with it, of those that ended together.

    One that was killed from outside comes first; one that aborted, or ended by itself, may only have lost a peer.
    """

    def order(rank: dict[str, Any]) -> tuple[int, float, int]:
        by = rank.get("signal")
        return (0 if by in CULPRITS else 2 if by == signal.SIGABRT else 1, rank.get("at", 0.0), rank["rank"])

    return min(ranks, key=order, default=None)


def story(rank: dict[str, Any], others: int) -> str:
    """How the first rank ended, and what became of the others."""
    code = rank["code"] if rank.get("signal") is None else -rank["signal"]
    return f"{_rank(rank)}: {ending(code)}{_stopped(others, 'the other')}"


def _stopped(ranks: int, which: str) -> str:
    many = {0: "", 1: f"; {which} rank was stopped by us"}
    return many.get(ranks, f"; {which} {ranks} ranks were stopped by us")


def _rank(told: dict[str, Any]) -> str:
    return f"rank {told['rank']} (process {told.get('pid')})"


# Children that hang --------------------------------------------------------------------------------------------


class Watch:
    """Do the ranks of a child get on? Each writes its pulse into a file of the folder, ``pulse-N.json``.

    Args:
        settings: ``least_s``, below which nothing counts as hung, and ``factor``, so many times the usual step.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._seen: dict[str, tuple[dict[str, Any], float]] = {}
        self._looked = time.monotonic()
        for path in glob.glob(self._pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)

    @property
    def _pattern(self) -> str:
        return os.path.join(glob.escape(self._folder), "pulse-*.json")

    @property
    def pulses(self) -> list[dict[str, Any]]:
        """The newest of each rank, in order."""
        return sorted((pulse for pulse, _ in self._seen.values()), key=lambda pulse: int(pulse["rank"]))

    def look(self, now: float) -> str:
        """Why the child counts as hung at the monotonic time ``now``; empty: it does not."""
        gap = now - self._looked
        if gap < LOOK_S:
            return ""
        self._looked = now
        slept = gap - LOOK_S if gap > 5 * LOOK_S else 0.0  # we stood still as well: nobody can be blamed
        for path in glob.glob(self._pattern):
            pulse = read_json(path)
            before, since = self._seen.get(path, (None, now))
            if pulse is not None and pulse.keys() >= {"rank", "pid", "birth", "dump_signal"}:
                self._seen[path] = (pulse, now if pulse != before else since + slept)
        return self._hung(now)

    def _hung(self, now: float) -> str:
        for path in sorted(self._seen):
            pulse, since = self._seen[path]
            usual_s = float(pulse.get("step_s") or 0.0)
            limit_s = max(float(self._settings["least_s"]), float(self._settings["factor"]) * usual_s)
            if pulse.get("state") == "resting":
                continue
            slow = pulse.get("state") not in ("training", "waiting")
            if now - since > limit_s * (SLOW_WORK if slow else 1.0):
                usual = f", a step usually takes {span(usual_s)}" if usual_s else ""
                where = f"{_rank(pulse)}, {pulse.get('state')} at step {pulse.get('step')}"
                return f"no sign of life for {span(now - since)} from {where}{usual}"
        return ""


def dump_stacks(pulses: list[dict[str, Any]], python: str, log: Any) -> None:
    """Have each rank write where it stands into its own log; py-spy, where it is installed, into ``log``.

    A rank that was stopped (SIGSTOP) is woken up for that.
    """
    for pulse in pulses:
        if birth(pulse["pid"]) == pulse["birth"]:
            for number in (pulse["dump_signal"], signal.SIGCONT):
                with contextlib.suppress(OSError):
                    os.kill(pulse["pid"], number)
    spy = shutil.which("py-spy", path=os.path.dirname(python)) or shutil.which("py-spy")
    if spy is None:
        time.sleep(0.5)  # for the ranks to have written
        return
    end = time.monotonic() + DUMP_S
    for pulse in pulses:
        argv = [spy, "dump", "--nonblocking", "--pid", str(pulse["pid"])]
        left_s = max(0.1, end - time.monotonic())
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=left_s, check=False)


# The loop -------------------------------------------------------------------------------------------------------


class Supervisor:
    """Keeps the child of one folder. ``run`` returns when nothing of the job is left."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        job = read_json(self._path("job.json"))
        if job is None:
            raise SystemExit(f"{self._path('job.json')} is missing or is not a JSON object")
        self.job = job
        self.restart = {"limit": 10, "backoff_s": 2.0, "backoff_limit_s": 60.0}
        self.restart.update(job.get("restart") or {})
        self.restarts = 0
        self.failures = 0
        """Ends of its own fault since the child last made progress."""
        self.memory_ends = 0
        """Those for lack of memory among them."""
        self.asked = ""
        """Why we were told to stop; empty while we were not."""
        self.taken = False
        """A signal from outside told us: the machine is taken away."""
        self.hung = ""
        """Why the child's present life was ended as hung; empty: it was not."""
        self.trouble = ""
        """Why the child could not be started."""
        self.killed_before: tuple[str, int] | None = None
        """``memory_kills`` when the child's present life began."""
        self.used_s = float((read_json(self._path("used.json")) or {}).get("seconds", 0.0))
        """How long supervisors of this folder have kept the job."""
        self._counted = time.monotonic()
        self.child: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Of the child's present life, or of its last one."""
        self.state: dict[str, Any] = {}
        self._woken, self._waker = os.pipe()
        for descriptor in (self._woken, self._waker):
            os.set_blocking(descriptor, False)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _log(self, text: str) -> None:
        append_line(2, f"{utc()} {self.job['name']}: {text}")

    def _count(self, hold: bool) -> None:
        """Keep what is used of the budget; when that is all of it, ask the child to end (file ``spent``)."""
        now = time.monotonic()
        self.used_s, self._counted = self.used_s + now - self._counted, now
        if self.job.get("budget_s") is None:
            return
        try:
            write_json(self._path("used.json"), {"seconds": self.used_s}, hold=hold)
            if self._overdrawn():
                open(self._path("spent"), "w").close()
        except OSError as error:
            self._log(f"used.json not written: {error}")

    def _overdrawn(self, by_s: float = 0.0) -> bool:
        budget = self.job.get("budget_s")
        return budget is not None and self.used_s >= budget + by_s

    def _tell(self, state: str, **more: Any) -> None:
        hold = state != "ended"
        self._count(hold)
        if state != self.state.get("state"):
            self.state["since"] = utc()
        self.state.update(
            state=state,
            supervisor_pid=os.getpid(),
            supervisor_birth=birth(os.getpid()),
            boot_id=boot_id(),
            restarts=self.restarts,
            beat=time.time(),
            **more,
        )
        try:
            write_json(self._path("state.json"), self.state, hold=hold)
        except OSError as error:
            self._log(f"state.json not written: {error}")

    def _beat(self) -> None:
        if time.time() - self.state["beat"] > BEAT_S or time.time() < self.state["beat"]:
            self._tell(self.state["state"])

    def _stop_asked(self) -> bool:
        if not self.asked and os.path.exists(self._path("stop")):
            self.asked = ASKED
        if not self.asked and self._overdrawn(BUDGET_GRACE_S):
            self.asked = BY_BUDGET
        return bool(self.asked)

    def _wait(self, seconds: float) -> None:
        """Sleep, but wake up at once when a child ends or a signal comes."""
        select.select([self._woken], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _on_signal(self, number: int, _: Any) -> None:
        if not self.asked:
            self.asked, self.taken = f"the supervisor got {signal.Signals(number).name}", True

    def run(self, held: dict[str, Any] | None, preempted: dict[str, Any] | None = None) -> None:
        """Keep the child until it is done, is stopped, or fails for good.

        Args:
            held: state of a lost predecessor.
            preempted: last word of a predecessor that the machine was taken from.
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # schedulers give notice with any of them
            signal.signal(number, self._on_signal)
        # What lies there now is of an earlier life, unless a lost predecessor had a child since.
        before = _signature(self.job.get("outcome")) if held is None else held.get("outcome_before")
        if held is not None:
            self.restarts = held.get("restarts", 0)
            self._log(f"taking over from supervisor {held.get('supervisor_pid')}, which was lost")
        last, kind = (loss(held), loss_kind(held)) if held else ("", "")
        if preempted is not None:
            self.restarts, last, kind = preempted.get("restarts", 0) + 1, preempted.get("reason", ""), PREEMPTED
        self._tell("starting", child_pid=None, outcome_before=before, last=last, last_kind=kind)
        reserve(self._path("exit.json"))
        self.reached = furthest(self.job.get("progress"))
        # Workers that a lost predecessor has left may be well: they get the time that a checkpoint takes.
        self._end_rest(self._stop_timeout_s() if held is not None else self._grace_s())
        verdict = self._told(before) if held is not None else None
        if verdict is not None and verdict["outcome"] != "finished":
            verdict = None  # stopped or failed before we were asked to start it again
        while verdict is None:
            if self._stop_asked():
                verdict = {"outcome": "stopped", "reason": self.asked}
                break
            before = _signature(self.job.get("outcome"))
            code = self._child(before)
            reached = furthest(self.job.get("progress"))
            if reached > self.reached:
                self.reached, self.failures, self.memory_ends = reached, 0, 0
            why = self._why(code, self._said(before))
            self.memory_ends += why["kind"] == MEMORY
            verdict = self._verdict(why, self._told(before))
            if verdict is None:
                self.restarts += 1
                self.failures += why["kind"] not in (PREEMPTED, NODE_LOST)
                self._pause(why)
        left = self._end_rest(self._grace_s())
        if left:
            verdict["reason"] = f"{verdict.get('reason', '')}; processes that would not end: {left}"
        if verdict["outcome"] == "stopped" and self._overdrawn():
            verdict["reason"] = f"{BY_BUDGET}: {span(self.used_s)} of {span(self.job['budget_s'])} used"
        self._log(f"{verdict['outcome']}: {verdict.get('reason') or 'done'}")
        self._end(verdict)

    def _end(self, verdict: dict[str, Any]) -> None:
        """The last word: nothing of the job is left."""
        verdict.update(restarts=self.restarts, at=utc())
        kind = PREEMPTED if self.taken and verdict["outcome"] == "stopped" else ""
        usual = {"code": None, "signal": None, "kind": kind, "rank": None, "reason": ""}
        write_json(self._path("exit.json"), dict(usual, **verdict), durable=True)
        self._tell("ended", child_pid=None)

    def _child(self, before: list[int] | None) -> int:
        """One life of the child, until its whole group is gone. Returns its code, negative for a signal."""
        self.hung = self.trouble = ""
        self.killed_before = memory_kills()
        with contextlib.suppress(OSError):
            os.unlink(self.job.get("ranks_ended") or "")
        watch = Watch(self.folder, self.job["watchdog"]) if self.job.get("watchdog") else None
        try:
            self._await_ports()
            self.child = self._spawn()
        except (OSError, ValueError) as error:
            self.trouble = f"cannot start {self.job['argv'][0]}: {error}"
            self._log(self.trouble)
            return 127
        pid = self.pid = self.child.pid
        self._log(f"started pid {pid}")
        self._tell("running", child_pid=pid, child_birth=birth(pid), outcome_before=before)
        # WNOWAIT: the child stays a zombie until its group is gone, so its number cannot be given to anybody else.
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if self._stop_asked():
                self._tell("stopping")
                break
            self.hung = watch.look(time.monotonic()) if watch else ""
            if watch and self.hung:
                self._note(f"islandctl: {self.hung}; its stacks go into the logs, then it is ended")
                with contextlib.suppress(OSError), open(self._node_log(), "ab") as log:
                    dump_stacks(watch.pulses, self.job["argv"][0], log)
                break
            self._beat()
            self._wait(POLL_S)
        self._end_group(pid)
        code = self.child.wait()
        self.child = None
        self._end_rest(self._grace_s())
        self._log(f"pid {pid}: {ending(code)}")
        return code

    def _await_ports(self) -> None:
        """The ports that the child will listen on, tried by binding. Raises ValueError: one is taken, and by whom."""
        for address, port in self.job.get("binds") or ():
            end = time.monotonic() + PORT_PATIENCE_S
            while True:
                problem = taken(address, port)
                if not problem:
                    break
                if time.monotonic() > end or self._stop_asked():
                    raise ValueError(problem)
                self._beat()
                self._wait(POLL_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        job = self.job
        env = dict(os.environ)
        env.update(job.get("env") or {})
        for path in job.get("env_files") or ():
            secrets = read_json(path)
            if secrets is None:
                raise ValueError(f"{path} is missing or is not a JSON object")
            env.update(secrets)
        env.update({MARK: job["mark"], JOB: job["name"], LIFE: f"{os.getpid()}.{self.restarts}"})
        env[LOG] = self._log_base
        argv = list(job["argv"])
        self._turn_log()
        if job.get("setup"):
            argv = ["/bin/sh", "-c", "\n".join(job["setup"]) + '\nexec "$@"', "sh", *argv]
        with open(self._node_log(), "ab") as log:
            return subprocess.Popen(
                argv,
                cwd=job["cwd"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _log_base(self) -> str:
        return self._path(f"logs/{self.job['name'].rpartition('/')[2]}")

    def _node_log(self) -> str:
        """The newest piece of the child's log."""
        return (pieces(self._log_base) or [(0, f"{self._log_base}.log")])[-1][1]

    def _turn_log(self) -> None:
        """A new piece of the child's log for its next life, when the newest is large; the oldest goes."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self._node_log()) >= LOG_BYTES:
                number = pieces(self._log_base)[-1][0] + 1
                open(f"{self._log_base}.{number}.log", "ab").close()
                for _, path in pieces(self._log_base)[:-LOG_PIECES]:
                    os.unlink(path)

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError), open(self._node_log(), "ab", buffering=0) as log:
            append_line(log.fileno(), line)

    def _end_group(self, pid: int) -> None:
        """TERM the child's group, wait, KILL. The child is not reaped yet, so the number is still ours."""
        deadline = time.monotonic() + self._grace_s()
        number: int | None = signal.SIGTERM
        while self._group_lives(pid):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)
                number = None
            if time.monotonic() > deadline:
                number, deadline = signal.SIGKILL, time.monotonic() + 5.0
            self._beat()
            self._wait(0.05)

    def _grace_s(self) -> float:
        """Between TERM and KILL: what the job asks for when it is stopped, less for the rest of a crashed child.

        One that only seemed hung, since somebody had stopped one of its ranks, can save as well.
        """
        return self._stop_timeout_s() if self.asked or self.hung else min(self._stop_timeout_s(), CRASH_GRACE_S)

    def _stop_timeout_s(self) -> float:
        return float(self.job.get("stop_timeout_s", 60.0))

    @staticmethod
    def _group_lives(group: int) -> bool:
        for name in os.listdir("/proc"):
            fields = _stat(int(name)) if name.isdigit() else None
            if fields and fields[0] not in "ZX" and int(fields[2]) == group:
                return True
        return False

    def _end_rest(self, grace_s: float) -> list[int]:
        """End what carries our name but left the group, or was left by a predecessor."""
        return end_marked(self.job["mark"], self.job["name"], grace_s, (os.getpid(),))

    def _said(self, before: list[int] | None) -> dict[str, Any]:
        """The child's own last word, if it was said since ``before``."""
        path = self.job.get("outcome")
        return (read_json(path) if path and _signature(path) != before else None) or {}

    def _told(self, before: list[int] | None) -> dict[str, Any] | None:
        """The child's own last word, if it was said since ``before`` and is final."""
        told = self._said(before)
        if told.get("outcome") == "failed" and told.get("retry", True):
            return None
        if told.get("outcome") == "stopped" and told.get("retry") and not self.asked:
            return None  # somebody's signal, or ours to the rest of a child that died: nobody asked for a stop
        if told.get("outcome") not in ("finished", "stopped", "failed"):
            return None
        return {"outcome": told["outcome"], "reason": told.get("reason") or ""}

    def _why(self, code: int, said: dict[str, Any]) -> dict[str, Any]:
        """How the child ended: ``kind`` and ``cause``, ``code`` or ``signal``, and the ``rank`` that was first."""
        ended = read_json(self.job.get("ranks_ended") or "") or {}
        first = first_to_fail(ended.get("ranks") or [])
        why: dict[str, Any] = {
            "kind": CRASH,
            "cause": self.trouble or self._ending(code),
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "rank": self._only_rank(),
        }
        if first is not None:
            why.update(cause=story(first, len(self.job.get("ranks") or [0]) - 1))
            why.update({key: first.get(key) for key in ("code", "signal", "rank")})
        # What another rank says beside one that was killed is only what it saw of that.
        witness = first is not None and first.get("signal") in CULPRITS and said.get("rank") != first["rank"]
        witness = witness or (said.get("kind") == PEER_LOST and why["signal"] is not None)
        if said.get("outcome") == "failed" and not witness:
            why.update(cause=said.get("reason") or why["cause"], rank=said.get("rank"))
            why.update(kind=said.get("kind") or CRASH)
        elif self.hung:
            why.update(kind=HUNG, cause=self.hung)
        elif self._starved(why):
            why.update(kind=MEMORY)
        elif code in (-signal.SIGTERM, -signal.SIGINT) or ended.get("signal") or _stopped_itself(code, said):
            by = ended.get("signal") or -min(0, code)
            why.update(kind=PREEMPTED, cause=f"ended by {named(by)} from outside" if by else said["reason"])
        elif why["code"] and not said:
            why["cause"] += no_room(self.folder)
        return why

    def _ending(self, code: int) -> str:
        """How the child itself ended: torchrun, where it keeps ranks. After set-up lines a code may be theirs."""
        ranks = self.job.get("ranks") or ()
        if not self.job.get("ranks_ended") or (code >= 0 and self.job.get("setup")):
            return ending(code)
        return f"torchrun (process {self.pid}): {ending(code)}{_stopped(len(ranks), 'its') if code < 0 else ''}"

    def _only_rank(self) -> int | None:
        """The rank that the child itself was; None: it keeps several, or none, or did not begin."""
        ranks = self.job.get("ranks") or []
        alone = len(ranks) == 1 and not self.job.get("ranks_ended") and not self.trouble
        return int(ranks[0]) if alone else None

    def _starved(self, why: dict[str, Any]) -> bool:
        """Was it the kernel that killed it, for lack of memory? Then its count has grown; the cause says so."""
        if why["signal"] != signal.SIGKILL and why["code"] != 128 + signal.SIGKILL:
            return False
        now, before = memory_kills(), self.killed_before
        if now is None or before is None or now[0] != before[0] or now[1] <= before[1]:
            return False
        why["cause"] += (
            f"; the kernel did it for lack of memory ({now[0]}: oom_kill rose from {before[1]} to {now[1]})"
        )
        return True

    def _verdict(self, why: dict[str, Any], told: dict[str, Any] | None) -> dict[str, Any] | None:
        """How the job ended; None: start the child again."""
        how = {key: why[key] for key in ("code", "signal")}
        if told is not None:
            failed = told["outcome"] == "failed"
            return dict(told, **how, **({"kind": why["kind"], "rank": why["rank"]} if failed else {}))
        if self.asked:
            return dict(how, outcome="stopped", reason=self.asked)
        if why["code"] == 0 and not self.job.get("outcome") and not self.hung:
            return dict(how, outcome="finished", reason="")
        reason = ""
        if self.memory_ends >= MEMORY_ENDS:
            reason = f"{why['cause']}; out of memory for the second time without a step further"
        elif why["kind"] not in (PREEMPTED, NODE_LOST) and self.failures >= self.restart["limit"]:
            reason = f"{why['cause']}; {self.failures} restarts without progress"
        return dict(how, outcome="failed", kind=why["kind"], rank=why["rank"], reason=reason) if reason else None

    def _pause(self, why: dict[str, Any]) -> None:
        times = 2.0 ** min(max(0, self.failures - 1), 30)
        pause = min(self.restart["backoff_limit_s"], self.restart["backoff_s"] * times)
        self._note(f"islandctl: {why['kind']}: {why['cause']}; restart {self.restarts} in {pause:.1f} s")
        self._tell("backoff", child_pid=None, last=why["cause"], last_kind=why["kind"])
        end = time.monotonic() + pause
        while time.monotonic() < end and not self._stop_asked():
            self._beat()
            self._wait(min(POLL_S, end - time.monotonic()))


def _stopped_itself(code: int, said: dict[str, Any]) -> bool:
    """Its processes were asked by somebody's signal to save and end, and did, before we had sent them any."""
    return code == 0 and said.get("outcome") == "stopped" and bool(said.get("retry"))


def span(seconds: float) -> str:
    """``12.5 h``, ``14.2 min`` or ``30.0 s``."""
    for limit, unit, scale in ((600.0, "s", 1), (7200.0, "min", 60)):
        if seconds < limit:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


def named(number: int) -> str:
    """``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def ending(code: int) -> str:
    """``killed by signal 9 (SIGKILL)`` or ``exit code 3``."""
    if code < 0:
        return f"killed by {named(-code)}"
    shells = f", which is how a shell tells {named(code - 128)}" if 128 < code < 128 + signal.NSIG else ""
    return f"exit code {code}{shells}"


# Commands -------------------------------------------------------------------------------------------------------


def keep(folder: str, kind: type[Supervisor] = Supervisor) -> None:
    """Take the folder's lock and run the loop."""
    lock = os.open(os.path.join(folder, "supervisor.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise SystemExit(f"another supervisor holds {folder}") from None
        # Some cluster file systems know no locks: ``start`` has looked at the processes already.
    state = read_json(os.path.join(folder, "state.json"))
    ended = os.path.join(folder, "exit.json")
    told = read_json(ended)
    lost = state is not None and state.get("state") in LIVE and not os.path.exists(ended)
    for name in ("exit.json",) if lost else ("exit.json", "stop"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    preempted = told is not None and (told.get("outcome"), told.get("kind")) == ("stopped", PREEMPTED)
    kind(folder).run(state if lost else None, told if preempted else None)


def start(folder: str, python: str) -> dict[str, Any]:
    """Begin a supervisor in a session of its own; returns once it has taken the folder.

    The answer holds ``started`` and ``supervisor_pid``, or ``reason`` when it was refused.
    """
    folder = os.path.abspath(folder)
    if not os.path.isdir("/proc/self"):
        return {"started": False, "alive": False, "reason": "the supervisor needs Linux (there is no /proc)"}
    state = read_json(os.path.join(folder, "state.json"))
    if state is not None and lives(state):
        return {"started": False, "alive": True, "reason": f"supervisor {state['supervisor_pid']} runs already"}
    job = read_json(os.path.join(folder, "job.json"))
    if job is None:
        return {"started": False, "alive": False, "reason": f"no job.json in {folder}"}
    os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
    env = dict(os.environ)
    env.update({MARK: job["mark"], JOB: job["name"]})
    with open(os.path.join(folder, "logs", "supervisor.log"), "ab") as log:
        child = subprocess.Popen(
            [python, "-S", os.path.abspath(__file__), "keep", folder],  # it needs no packages, and starts sooner
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        state = read_json(os.path.join(folder, "state.json"))
        if state is not None and state.get("supervisor_pid") == child.pid:
            return {"started": True, "supervisor_pid": child.pid}
        if child.poll() is not None:
            break
        time.sleep(0.02)
    return {"started": False, "alive": False, "reason": "the supervisor did not come up; see logs/supervisor.log"}


def stop(folder: str, timeout_s: float) -> dict[str, Any]:
    """Set the stop switch and wait for the end; a lost supervisor's leftovers are ended here. ``late``: not yet."""
    if states([folder])[0]["state"] in ("absent", "ended"):
        _see_it_gone(folder)
        return {"late": False}
    with open(os.path.join(folder, "stop"), "w"):
        pass
    deadline = time.monotonic() + timeout_s
    while states([folder])[0]["state"] in LIVE:
        if time.monotonic() > deadline:
            return {"late": True}
        time.sleep(0.05)
    job = read_json(os.path.join(folder, "job.json"))
    if job is not None and states([folder])[0]["state"] == "lost":
        left = end_marked(job["mark"], job["name"], max(0.0, deadline - time.monotonic()))
        state = read_json(os.path.join(folder, "state.json")) or {}
        reason = (
            f"its supervisor was lost; processes that would not end: {left}" if left else "its supervisor was lost"
        )
        told = read_json(job.get("outcome") or "") or {}  # the child removes an older one when it begins
        outcome = "finished" if told.get("outcome") == "finished" else "stopped"
        verdict = {"outcome": outcome, "code": None, "signal": None, "reason": reason, "at": utc()}
        write_json(os.path.join(folder, "exit.json"), dict(verdict, restarts=state.get("restarts", 0)), durable=True)
        write_json(os.path.join(folder, "state.json"), dict(state, state="ended", child_pid=None, since=utc()))
    _see_it_gone(folder)
    return {"late": False}


def _see_it_gone(folder: str) -> None:
    """A supervisor that has written its last word is still a process for a moment; whoever proves an end waits."""
    deadline = time.monotonic() + 5.0
    while lives(read_json(os.path.join(folder, "state.json"))) and time.monotonic() < deadline:
        time.sleep(0.01)


def command(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) != 2 or arguments[0] not in ("start", "keep"):
        sys.stderr.write("usage: supervisor.py start|keep FOLDER\n")
        return 2
    if arguments[0] == "keep":
        keep(arguments[1])
        return 0
    answer = start(arguments[1], sys.executable)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if answer["started"] else 1


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
