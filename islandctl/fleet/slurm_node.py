"""One node of a cell's Slurm job: it finds out where the cell's nodes meet and how the relay is reached, and then is
the node's supervisor. Standard library only.

    python -m islandctl.fleet.slurm_node CELL_FOLDER    as srun begins it, once on every node

A supervisor under Slurm takes a signal for an interruption and not for an end: Slurm sends TERM when the time limit
is near, and before it takes the nodes away. The workers checkpoint and end, the job is queued again, and the next
life goes on from there. Only the switch ``stop`` ends it for good.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from typing import Any, ClassVar

from islandctl.fleet.supervisor import Supervisor, keep, read_json, utc, write_json

MEET_S = 300.0
"""Slurm begins all tasks at once; a slow file system may show the first node's word late."""
REACH_S = 5.0
LOCK_S = 180.0
"""A node that was lost may hold its lock on a shared file system until its lease has run out."""
MASTER = "PET_MASTER_ADDR"
"""torchrun takes what is not among its options from variables of this form."""
RELAY = "ISLANDCTL_RELAY_URL"


class InJob(Supervisor):
    """A supervisor that learns some of its job only here.

    Args:
        folder: the supervisor's.
        found: variables of the environment that were found out.
    """

    found: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.job["env"] = {**(self.job.get("env") or {}), **self.found}
        if MASTER in self.found and os.environ["SLURM_PROCID"] == "0":
            self.job["binds"] = [[self.found[MASTER], int(self.found["PET_MASTER_PORT"])]]

    def _tell(self, state: str, **more: Any) -> None:
        """With the node's name, which nobody knew before."""
        super()._tell(state, node=os.environ.get("SLURMD_NODENAME", ""), **more)


def node(cell: str) -> None:
    """Supervise this task's node."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # nothing has begun yet that could be saved
    index, total = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    folder = os.path.join(cell, f"node-{index}")
    log = os.open(os.path.join(folder, "logs", "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for given, standard in ((null, 0), (log, 1), (log, 2)):
        os.dup2(given, standard)
    submission, job = (read_json(path) for path in (os.path.join(cell, "slurm.json"), f"{folder}/job.json"))
    if submission is None or job is None:
        raise SystemExit(f"slurm.json or job.json is missing in {cell}")
    sys.stderr.write(f"{utc()} {job['name']}: on {socket.gethostname()}, {key()}\n")
    if total > 1:
        address, port, own = meet(cell, index, total)
        InJob.found.update({MASTER: address, "PET_MASTER_PORT": str(port), "PET_LOCAL_ADDR": own})
    if url := reachable((job.get("env") or {}).get(RELAY, ""), submission.get("login") or []):
        InJob.found[RELAY] = url
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return keep(folder, InJob)
        except SystemExit as error:
            if "another supervisor holds" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(2.0)


def key() -> str:
    """Names this life of the job."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return "job " + ".".join(os.environ.get(name) or "0" for name in names)


def meet(cell: str, index: int, total: int) -> tuple[str, int, str]:
    """Where the cell's nodes meet: an address of the first node that this one has reached, a port that is free there,
    and this node's own address on that way.

    The first node waits at the port until all others have come, and leaves it to torchrun.

    Raises:
        SystemExit: they do not find each other.
    """
    path, deadline = os.path.join(cell, "meeting.json"), time.monotonic() + MEET_S
    if index == 0:
        return _host_meeting(path, total, deadline)
    tried: list[str] = []
    while time.monotonic() < deadline:
        told = read_json(path) or {}
        if told.get("key") == key():
            tried = told["addresses"]
            for address in tried:
                if own := _call(address, told["port"], told["word"], index):
                    return address, told["port"], own
        time.sleep(0.2)
    what = f"at any of {', '.join(tried)}" if tried else "and no word of it in meeting.json"
    raise SystemExit(f"the cell's first node is not reached {what}, within {MEET_S:.0f} s")


def _host_meeting(path: str, total: int, deadline: float) -> tuple[str, int, str]:
    word, missing = secrets.token_hex(8), set(range(1, total))
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(
        ("", 0), family=family, backlog=total, dualstack_ipv6=family == socket.AF_INET6
    ) as server:
        port = server.getsockname()[1]
        known = addresses()
        write_json(path, {"key": key(), "word": word, "addresses": known, "port": port}, durable=True)
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                caller, _ = server.accept()
                with caller:
                    caller.settimeout(REACH_S)
                    said = caller.recv(256).decode().split()
                    if len(said) == 2 and said[0] == word:
                        caller.sendall(word[::-1].encode())
                        missing.discard(int(said[1]))
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    who = ", ".join(map(str, sorted(missing)))
                    raise SystemExit(f"nodes {who} of the cell have not come within {MEET_S:.0f} s") from None
    return known[0], port, known[0]


def _call(address: str, port: int, word: str, index: int) -> str:
    """This node's own address, as the first node sees it; empty: the first node is not there, or it is not it."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as line:
            line.sendall(f"{word} {index}".encode())
            return str(line.getsockname()[0]) if line.recv(256).decode() == word[::-1] else ""
    except (OSError, ValueError):
        return ""


def addresses() -> list[str]:
    """This node's addresses, the likeliest first; loopback last, for nodes that are one machine."""
    found = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # no packet is sent: connecting a datagram socket only asks the routing table which address would be used
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            found.append(sock.getsockname()[0])
    for name in filter(None, (os.environ.get("SLURMD_NODENAME"), socket.gethostname())):
        with contextlib.suppress(OSError):
            found += [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(["hostname", "-I"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        found += told.stdout.decode(errors="replace").split()
    local = [one for one in found if one.startswith(("127.", "fe80")) or one == "::1"]
    return [*dict.fromkeys(one for one in found if one not in local), "127.0.0.1"]


def reachable(url: str, login: list[str]) -> str:
    """The relay's address from here: where the login node passes connections on, by a name that is reached.

    Args:
        url: as the controller wrote it; that of another host stays as it is.
        login: names and addresses of the login node.

    Raises:
        SystemExit: none of them is reached.
    """
    found = re.fullmatch(r"https://\[?([^\]/]+?)\]?:(\d+)", url)
    if found is None or found[1] not in login[:1]:
        return url
    deadline = time.monotonic() + REACH_S * 6
    while time.monotonic() < deadline:
        for name in login:
            with contextlib.suppress(OSError), socket.create_connection((name, int(found[2])), timeout=REACH_S):
                return f"https://{f'[{name}]' if ':' in name else name}:{found[2]}"
        time.sleep(1.0)
    raise SystemExit(
        f"the login node passes connections to the relay on at port {found[2]}, but is not reached from "
        f"{socket.gethostname()} at any of {', '.join(login)}; set relay.address in the recipe"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m islandctl.fleet.slurm_node CELL_FOLDER")
    node(sys.argv[1])
