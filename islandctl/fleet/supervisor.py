"""The supervisor: keeps one child alive on a node, outlives the SSH link, and tells how it ended by files.

One file, standard library only, Python 3.8 or newer, Linux. It is copied to the node and run there:

    python supervisor.py start FOLDER    begin in the background; returns at once; refused while one lives
    python supervisor.py keep FOLDER     the loop itself (what ``start`` begins)

The files in FOLDER are described in docs/architecture.md. The functions ``states``, ``leftovers`` and ``end_marked``
are also sent to a node as they are (see ``node.py``), so that there is one authority on what runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
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
MARK, JOB, LIFE = "ISLANDCTL_RUN", "ISLANDCTL_JOB", "ISLANDCTL_LIFE"
ASKED = "asked to stop"
LIVE = ("starting", "running", "backoff", "stopping")


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


def leftovers(mark: str) -> list[dict[str, Any]]:
    """Every process of the run on this machine: pid, command, job."""
    found = []
    for pid, _, environ in marked(mark):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = os.fsdecode(file.read().replace(b"\0", b" ")).strip()
        except OSError:
            continue
        found.append({"pid": pid, "command": command[:400], "job": environ.get(JOB, "")})
    return found


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


def states(folders: list[str]) -> list[dict[str, Any]]:
    """What the supervisors of these folders do; the keys are those of ``SupervisorState``."""
    answers: list[dict[str, Any]] = []
    for folder in folders:
        state = read_json(os.path.join(folder, "state.json"))
        if state is None:
            answers.append({"state": "absent"})
            continue
        answer: dict[str, Any] = {
            key: state.get(key) for key in ("state", "restarts", "child_pid", "supervisor_pid", "since", "last")
        }
        answer["beat_age_s"] = max(0.0, time.time() - state.get("beat", 0.0))
        if state["state"] in LIVE and not lives(state):
            # Its last word counts, also where a full disk left no room to tell the state after it.
            answer["state"] = "ended" if os.path.exists(os.path.join(folder, "exit.json")) else "lost"
            answer["reason"] = loss(state)
            job = read_json(os.path.join(folder, "job.json")) or {}
            rest = marked(job["mark"], job["name"]) if "mark" in job else ()
            answer["orphans"] = any(LIFE in environ for _, _, environ in rest)  # the next supervisor has none
        ended = read_json(os.path.join(folder, "exit.json")) if answer["state"] == "ended" else None
        if ended:
            answer.update({key: ended.get(key) for key in ("outcome", "code", "signal", "reason", "restarts")})
        answers.append(answer)
    return answers


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
        """Restarts since the child last made progress."""
        self.asked = ""
        """Why we were told to stop; empty while we were not."""
        self.used_s = float((read_json(self._path("used.json")) or {}).get("seconds", 0.0))
        """How long supervisors of this folder have kept the job."""
        self._counted = time.monotonic()
        self.child: subprocess.Popen[bytes] | None = None
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
        self.asked = f"the supervisor got {signal.Signals(number).name}"

    def run(self, held: dict[str, Any] | None) -> None:
        """Keep the child until it is done, is stopped, or fails for good. ``held``: state of a lost predecessor."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # What lies there now is of an earlier life, unless a lost predecessor had a child since.
        before = _signature(self.job.get("outcome")) if held is None else held.get("outcome_before")
        if held is not None:
            self.restarts = held.get("restarts", 0)
            self._log(f"taking over from supervisor {held.get('supervisor_pid')}, which was lost")
        self._tell("starting", child_pid=None, outcome_before=before, last=loss(held) if held else "")
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
                self.reached, self.failures = reached, 0
            verdict = self._verdict(code, self._told(before))
            if verdict is None:
                self.restarts += 1
                self.failures += 1
                self._pause(code, self._cause(code, before))
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
        write_json(
            self._path("exit.json"), dict({"code": None, "signal": None, "reason": ""}, **verdict), durable=True
        )
        self._tell("ended", child_pid=None)

    def _child(self, before: list[int] | None) -> int:
        """One life of the child, until its whole group is gone. Returns its code, negative for a signal."""
        try:
            self.child = self._spawn()
        except (OSError, ValueError) as error:
            self._log(f"cannot start: {error}")
            self._note(f"islandctl: cannot start {self.job['argv'][0]}: {error}")
            return 127
        pid = self.child.pid
        self._log(f"started pid {pid}")
        self._tell("running", child_pid=pid, child_birth=birth(pid), outcome_before=before)
        # WNOWAIT: the child stays a zombie until its group is gone, so its number cannot be given to anybody else.
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if self._stop_asked():
                self._tell("stopping")
                break
            self._beat()
            self._wait(POLL_S)
        self._end_group(pid)
        code = self.child.wait()
        self.child = None
        self._end_rest(self._grace_s())
        self._log(f"pid {pid}: {ending(code)}")
        return code

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
        argv = list(job["argv"])
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

    def _node_log(self) -> str:
        return self._path(f"logs/{self.job['name'].rpartition('/')[2]}.log")

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
        """Between TERM and KILL: what the job asks for when it is stopped, less for the rest of a crashed child."""
        return self._stop_timeout_s() if self.asked else min(self._stop_timeout_s(), CRASH_GRACE_S)

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

    def _told(self, before: list[int] | None) -> dict[str, Any] | None:
        """The child's own last word, if it was said since ``before`` and is final."""
        path = self.job.get("outcome")
        told = read_json(path) if path and _signature(path) != before else None
        if told is None or (told.get("outcome") == "failed" and told.get("retry", True)):
            return None
        if told.get("outcome") == "stopped" and told.get("retry") and not self.asked:
            return None  # somebody's signal, or ours to the rest of a child that died: nobody asked for a stop
        if told.get("outcome") not in ("finished", "stopped", "failed"):
            return None
        return {"outcome": told["outcome"], "reason": told.get("reason") or ""}

    def _verdict(self, code: int, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """How the job ended; None: start the child again."""
        how = {"code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        if told is not None:
            return dict(told, **how)
        if self.asked:
            return dict(how, outcome="stopped", reason=self.asked)
        if code == 0 and not self.job.get("outcome"):
            return dict(how, outcome="finished", reason="")
        if self.failures >= self.restart["limit"]:
            reason = f"{ending(code)}; {self.failures} restarts without progress"
            return dict(how, outcome="failed", reason=reason)
        return None

    def _cause(self, code: int, before: list[int] | None) -> str:
        """Why the child ended though nobody had asked it to: in its own words, or by its exit code."""
        path = self.job.get("outcome")
        told = read_json(path) if path and _signature(path) != before else None
        said = told.get("reason") if told and told.get("outcome") == "failed" else ""
        return str(said or ending(code))

    def _pause(self, code: int, cause: str) -> None:
        pause = min(self.restart["backoff_limit_s"], self.restart["backoff_s"] * 2.0 ** min(self.failures - 1, 30))
        self._note(f"islandctl: {ending(code)}; restart {self.restarts} in {pause:.1f} s")
        self._tell("backoff", child_pid=None, last=cause)
        end = time.monotonic() + pause
        while time.monotonic() < end and not self._stop_asked():
            self._beat()
            self._wait(min(POLL_S, end - time.monotonic()))


def span(seconds: float) -> str:
    """``12.5 h``, ``14.2 min`` or ``30.0 s``."""
    for limit, unit, scale in ((600.0, "s", 1), (7200.0, "min", 60)):
        if seconds < limit:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


def ending(code: int) -> str:
    """``killed by SIGKILL`` or ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


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
    told = os.path.exists(os.path.join(folder, "exit.json"))
    lost = state is not None and state.get("state") in LIVE and not told
    for name in ("exit.json",) if lost else ("exit.json", "stop"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    kind(folder).run(state if lost else None)


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
            [python, os.path.abspath(__file__), "keep", folder],
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
