"""The doctor's job as the login node sees it: begun, and spoken with through files that its nodes share. Standard
library only, Python 3.8 or newer: its text is sent there by slurm_visit.py, behind that of slurm_login.py.

Each node has two files, one a direction, that only grow: ``N.in`` is written here and read there, ``N.out`` the other
way round. All are there before the job is, and are opened anew for every look: a shared file system may take its time
until it shows a new name, but what has been added to a file that is opened it shows at once.
"""

from __future__ import annotations

import base64
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from islandctl.fleet.slurm_login import addresses, command, submitted

PIECE_BYTES = 4 << 20
"""Of one file in one answer."""
LOOK_S = 0.2
"""Between two looks: each opens a file a node, and the file system serves everybody."""


def visit_begin(args: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """Make the folder that the nodes will share, and submit the job. ``payload``: its script.

    Gives ``folder`` (absolute), ``login`` (this node's names) and ``job``, or ``error``; ``unknown`` with it: Slurm
    may have taken the job all the same.
    """
    folder, python = (os.path.expanduser(args[key]) for key in ("folder", "python"))
    folder = os.path.abspath(folder)
    os.makedirs(os.path.dirname(os.path.dirname(folder)), exist_ok=True)
    os.umask(0o077)  # what is carried holds the key to the relay
    os.makedirs(folder)
    for name, text in args["files"].items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    empty = [f"{index}.{way}" for index in range(args["nodes"]) for way in ("in", "out")]
    for name in (*empty, "beat", "nodes", "visit.log"):
        open(os.path.join(folder, name), "w").close()
    script = os.path.join(folder, "job.sh")
    with open(script, "wb") as file:
        file.write(payload)
    there = {"folder": folder, "login": addresses()}
    words = [folder, args["token"], args["mark"], python, args["boot"], args["over"]]
    told = command(["sbatch", "--parsable", *args["options"], script, *words], args["setup"])
    if told["code"] != 0:
        return {**there, "error": told["err"], "unknown": told["code"] is None}
    found = submitted(told["out"])
    return (
        {**there, "job": found} if found else {**there, "error": f"sbatch gave no job number: {told['out'][-300:]}"}
    )


def visit_carry(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Carry bytes both ways, and wait a little for some to come. The same call may come twice: it does no harm.

    ``send``: node → [offset, bytes] for its ``in``; ``at``: node → offset in its ``out``; ``log``: offset in the
    job's log; ``beat``: a number that was not there before.
    """
    folder = args["folder"]
    write_at(os.path.join(folder, "beat"), 0, str(args["beat"]).encode())
    for node, (offset, data) in args["send"].items():
        write_at(os.path.join(folder, node + ".in"), offset, base64.b64decode(data))
    end = time.monotonic() + args["wait_s"]
    while True:
        came = {node: read_from(os.path.join(folder, node + ".out"), at) for node, at in args["at"].items()}
        came = {node: data for node, data in came.items() if data}
        log = read_from(os.path.join(folder, "visit.log"), args["log"])
        if came or log or time.monotonic() > end:
            names = read_from(os.path.join(folder, "nodes"), 0).rpartition(b"\n")[0].decode(errors="replace").split()
            packed = {node: base64.b64encode(data).decode() for node, data in came.items()}
            return {"came": packed, "log": base64.b64encode(log).decode(), "nodes": names}
        time.sleep(LOOK_S)


def write_at(path: str, offset: int, data: bytes) -> None:
    """Write there, and have the file system pass it on."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_from(path: str, offset: int) -> bytes:
    """What lies behind an offset; empty: nothing, or no such file any more."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except OSError:
        return b""


def main(args: dict[str, Any], payload: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    return {"begin": visit_begin, "carry": visit_carry}[args["do"]](args, payload)
