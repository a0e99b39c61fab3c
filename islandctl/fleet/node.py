"""What a run does on a node, over any ``Host``: files, supervisors, logs. One round trip a call, many items in it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from islandctl.errors import RunError, UnreachableError
from islandctl.fleet import node_files, supervisor
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorJob, SupervisorState
from islandctl.fleet.local import LocalHost

TIMEOUT_S = 60.0
"""For calls that touch a few files: generous, since shared file systems stall."""
READ_LIMIT_BYTES = 4 << 20
STOP_GRACE_S = 45.0
"""Over the job's own time between TERM and KILL: for what remains, and for the supervisor's last words."""

READING = ("read_many", "tail_offsets", "sizes")
"""Calls that only read: on this machine they need no process of their own."""

AnyPath = PurePosixPath | str

_SUPERVISOR_CALLS = """
def begin(folder, supervisor, python, job):
    if states([folder])[0]["state"] in LIVE:
        return {"started": False, "alive": True}
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "job.json")
    with open(os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(job)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)
    global __file__
    __file__ = os.path.expanduser(supervisor)
    return start(folder, os.path.expanduser(python))


def main(args, payload):
    if args["do"] == "states":
        return states([os.path.expanduser(folder) for folder in args["folders"]])
    if args["do"] == "leftovers":
        return leftovers(args["mark"])
    if args["do"] == "remains":
        return remains(args["mark"], [os.path.expanduser(folder) for folder in args["folders"]], args["ports"])
    if args["do"] == "end":
        return end_marked(args["mark"], args["job"], args["timeout_s"])
    if args["do"] == "start":
        return begin(os.path.expanduser(args["folder"]), args["supervisor"], args["python"], payload)
    return stop(os.path.expanduser(args["folder"]), args["timeout_s"])
"""


@dataclass(frozen=True)
class Piece:
    """Part of a file."""

    data: bytes
    offset: int
    """Where ``data`` begins, in bytes."""
    size: int
    """The whole file's size when it was read."""

    @property
    def end(self) -> int:
        """The offset after the last byte: where to read on."""
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Leftover:
    """A process that carries the run's mark."""

    pid: int
    command: str
    job: str


@dataclass(frozen=True)
class Remains:
    """What a search of one host has found."""

    processes: tuple[Leftover, ...]
    ports: tuple[int, ...]
    """The run's, all of which were looked at."""
    taken: tuple[str, ...]
    """Who listens on them still."""
    accelerators: int | None
    """How many NVIDIA accelerators there are; None: none, or no workers ran here, or they are still there."""
    held: tuple[str, ...]
    """What holds memory on them."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """One folder in a cell's ``checkpoints``."""

    name: str
    manifest: dict[str, Any] | None
    """None: missing or damaged, so the checkpoint does not count."""
    raw: bytes | None
    """The manifest file's bytes, for hashing."""


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def _files(host: Host, do: str, payload: bytes = b"", timeout_s: float = TIMEOUT_S, **args: Any) -> Any:
    if isinstance(host, LocalHost) and do in READING:
        return host.here(node_files.main, {"do": do, **args}, payload)
    return host.python(_source("node_files.py"), {"do": do, **args}, timeout_s=timeout_s, payload=payload)


def _supervisor(host: Host, do: str, deadline_s: float = TIMEOUT_S, **args: Any) -> Any:
    return host.python(_source("supervisor.py") + _SUPERVISOR_CALLS, {"do": do, **args}, timeout_s=deadline_s)


def write_files(
    host: Host,
    folder: AnyPath,
    files: Mapping[str, tuple[bytes, int]],
    *,
    gone: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Write ``name → (content, mode)`` below a folder, which is made where missing; each file whole or not at all.

    Content travels on stdin and gets its mode (0o600 for secrets) before its first byte.

    Args:
        gone: files below the folder that are to be away then.
    """
    listed = [[name, len(content), mode] for name, (content, mode) in files.items()]
    payload = b"".join(content for content, _ in files.values())
    _files(host, "write_files", payload, timeout_s, folder=str(folder), files=listed, gone=list(gone))


def read_many(host: Host, parts: Sequence[tuple[AnyPath, int, int]]) -> list[Piece]:
    """Parts of files, each (path, byte offset, limit in bytes), in one round trip. A missing file is empty.

    A negative offset counts from the end.
    """
    asked = [(str(path), offset, limit) for path, offset, limit in parts]
    answers = _files(host, "read_many", parts=asked) if asked else []
    return [
        Piece(zlib.decompress(base64.b64decode(answer["data"])), answer["offset"], answer["size"])
        for answer in answers
    ]


def read(host: Host, path: AnyPath, offset: int = 0, limit: int = READ_LIMIT_BYTES) -> Piece:
    """Part of a file from a byte offset on. A missing file is empty."""
    return read_many(host, [(path, offset, limit)])[0]


def tail_offset(host: Host, path: AnyPath, lines: int) -> int:
    """The byte offset at which the last ``lines`` lines begin; 0 for a missing file."""
    return int(_files(host, "tail_offsets", paths=[str(path)], lines=lines)[0])


def tail_offsets(host: Host, paths: Sequence[AnyPath], lines: int) -> list[int]:
    """``tail_offset`` for many files in one round trip."""
    return [int(at) for at in _files(host, "tail_offsets", paths=[str(path) for path in paths], lines=lines)]


def read_tail(host: Host, path: AnyPath, num_bytes: int) -> bytes:
    """The last bytes of a file, beginning with a whole line where some were left out; empty for a missing file."""
    piece = read(host, path, -num_bytes, num_bytes)
    return piece.data.partition(b"\n")[2] if piece.offset else piece.data


def sizes(host: Host, folders: Sequence[AnyPath]) -> list[dict[str, int]]:
    """Name → size in bytes of the files directly in each folder; a missing folder is empty."""
    answers: list[dict[str, int]] = _files(host, "sizes", folders=[str(folder) for folder in folders])
    return answers


def remove(
    host: Host,
    work_dir: AnyPath,
    path: AnyPath,
    *,
    keep: str = "",
    emptied: bool = False,
    timeout_s: float = 600.0,
) -> bool:
    """Remove a file or folder below ``work_dir``. False: it was not there.

    Args:
        keep: what stays of the folder, where it holds that.
        emptied: the folder around it goes as well, when it has become empty.

    Raises:
        PreflightError: the path does not lie below ``work_dir``, links followed.
    """
    args: dict[str, Any] = {"work_dir": str(work_dir), "path": str(path), "keep": keep, "emptied": emptied}
    return bool(_files(host, "remove", timeout_s=timeout_s, **args))


def list_checkpoints(host: Host, cell_folder: AnyPath) -> list[StoredCheckpoint]:
    """A cell's checkpoint folders, by name."""
    answers = _files(host, "list_checkpoints", cell_folder=str(cell_folder))
    return [
        StoredCheckpoint(
            answer["name"], answer["manifest"], None if answer["raw"] is None else base64.b64decode(answer["raw"])
        )
        for answer in answers
    ]


def start(host: Host, supervisor_path: AnyPath, python: str, folder: AnyPath, job: SupervisorJob) -> int:
    """Write ``job.json`` and begin its supervisor; returns the supervisor's pid, at once.

    A supervisor that was lost is replaced: the new one first ends what its child left behind.

    Raises:
        RunError: one runs there already, or it did not come up.
    """
    answer = host.python(
        _source("supervisor.py") + _SUPERVISOR_CALLS,
        {"do": "start", "folder": str(folder), "supervisor": str(supervisor_path), "python": python},
        timeout_s=TIMEOUT_S,
        payload=job.model_dump_json(indent=1).encode(),
    )
    if not answer["started"] and answer["alive"]:
        raise RunError(
            f"{host.label}: a supervisor of {job.name} runs already in {folder}",
            hint=f"islandctl status {job.run}; or islandctl stop {job.run}",
        )
    if not answer["started"]:
        raise RunError(f"{host.label}: the supervisor of {job.name} did not start: {answer['reason']}")
    return int(answer["supervisor_pid"])


def states(host: Host, folders: Sequence[AnyPath]) -> list[SupervisorState]:
    """What the supervisors in these folders do, in one round trip."""
    listed = [str(folder) for folder in folders]
    if isinstance(host, LocalHost):
        answers = host.here(supervisor.states, [node_files.expand(folder) for folder in listed])
    else:
        answers = _supervisor(host, "states", folders=listed)
    return [
        SupervisorState(**{key: value for key, value in answer.items() if value is not None}) for answer in answers
    ]


def state(host: Host, folder: AnyPath) -> SupervisorState:
    """What the supervisor in this folder does."""
    return states(host, [folder])[0]


def stop(host: Host, folder: AnyPath, timeout_s: float) -> SupervisorState:
    """Have a supervisor end its child, and wait until it has; one that was lost has its leftovers ended here.

    Raises:
        UnreachableError: it had not ended in time; the stop switch is set and stays so.
    """
    answer = _supervisor(host, "stop", timeout_s + STOP_GRACE_S, folder=str(folder), timeout_s=timeout_s)
    if answer["late"]:
        raise UnreachableError(
            f"{host.label}: the supervisor in {folder} has not ended within {timeout_s:g} s; it was told to",
            hint="ask again with: islandctl status",
        )
    return state(host, folder)


def leftovers(host: Host, mark: str) -> list[Leftover]:
    """Every process of the run on this host, whatever its session."""
    return [Leftover(**found) for found in _supervisor(host, "leftovers", mark=mark)]


def remains(host: Host, mark: str, folders: Sequence[AnyPath] = (), ports: Sequence[int] = ()) -> Remains:
    """What is left of the run on this host; nothing is the proof that nothing is.

    Args:
        folders: of its supervisors here; their jobs tell on which ports they listened.
        ports: others that were listened on here.
    """
    told = _supervisor(host, "remains", mark=mark, folders=[str(folder) for folder in folders], ports=list(ports))
    return Remains(
        processes=tuple(Leftover(**found) for found in told["processes"]),
        ports=tuple(told["ports"]),
        taken=tuple(told["taken"]),
        accelerators=None if told["accelerators"] is None else int(told["accelerators"]["num"]),
        held=tuple((told["accelerators"] or {}).get("held", ())),
    )


def end_leftovers(host: Host, mark: str, timeout_s: float = 10.0, job: str | None = None) -> list[int]:
    """TERM, wait, KILL whatever of the run (or of one job of it) remains. Returns pids that would not die."""
    return [
        int(pid)
        for pid in _supervisor(host, "end", timeout_s + STOP_GRACE_S, mark=mark, job=job, timeout_s=timeout_s)
    ]


def free_port(host: Host, address: str = "127.0.0.1") -> int:
    """A TCP port that can be bound on the host right now, tested by binding it."""
    return int(host.python(_PORTS, {"do": "free", "address": address}, timeout_s=TIMEOUT_S))


def wait_port(host: Host, port: int, *, address: str = "127.0.0.1", timeout_s: float = 30.0) -> bool:
    """Whether, as seen from the host, something accepts connections there before the time is up."""
    args = {"do": "wait", "address": address, "port": port, "timeout_s": timeout_s}
    return bool(host.python(_PORTS, args, timeout_s=timeout_s + TIMEOUT_S))


_PORTS = """
import socket, time
def free(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        return sock.getsockname()[1]
def main(args, payload):
    if args["do"] == "free":
        return free(args["address"])
    deadline = time.monotonic() + args["timeout_s"]
    while True:
        try:
            socket.create_connection((args["address"], args["port"]), timeout=5).close()
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
"""
