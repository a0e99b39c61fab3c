"""What checks do on a node. Standard library only, Python 3.8 or newer: its text is sent there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

MORE_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/opt/rocm/bin:/usr/local/cuda/bin"
"""Behind the user's own PATH: where tools lie that a shell without a terminal does not find."""


def main(args: dict[str, Any], _: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    known = (tool, worker, system, free_port, can_bind, dial, listen_once, addresses, routes, leftovers)
    return {function.__name__: function for function in known}[args["do"]](args)


def expand(path: str) -> str:
    """``~`` is the node's own home."""
    return os.path.abspath(os.path.expanduser(path))


def run(argv: list[str], args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """A command after the profile's set-up lines, whatever those print."""
    marker = "<<" + os.urandom(8).hex() + ">>"
    lines = [
        *args["setup"],
        'printf "\\n%s %s\\n" "$MARKER" "$PATH"',
        f'PATH="$PATH:{MORE_PATH}"',
        'command -v "$1" >/dev/null 2>&1 || exit 127',
        'exec "$@"',
    ]
    command = ["/bin/sh", "-c", "\n".join(lines), "sh", *argv]
    environ = {**os.environ, "MARKER": marker, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=environ, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return {"code": -1, "out": "", "err": "", "path": "", "late": True}
    before, found, out = done.stdout.decode(errors="replace").partition("\n" + marker + " ")
    path, _, out = out.partition("\n")
    err = done.stderr.decode(errors="replace")
    if not found:
        said = (err or before).strip().splitlines()
        err = f"environment.setup ended with code {done.returncode}: {said[-1] if said else 'no output'}"
    missing = bool(found) and done.returncode == 127 and not out.strip()
    return {"code": done.returncode, "out": out, "err": err, "path": path, "missing": missing, "late": False}


def tool(args: dict[str, Any]) -> dict[str, Any]:
    """A tool of the node. A field that it does not know is asked by its other name, or left out."""
    argv = args["argv"]
    end = time.monotonic() + args["timeout_s"]
    while True:
        told = run(argv, args, max(1.0, end - time.monotonic()))
        again = other_fields(argv, told["out"] + told["err"], args["aliases"])
        if again is None or told["late"]:
            break
        argv = again
    if args["keep"]:
        wanted = re.compile(args["keep"])
        told["out"] = "".join(line + "\n" for line in told["out"].splitlines() if wanted.search(line))
    return {**told, "out": told["out"][-400000:], "err": told["err"][-4000:]}


def other_fields(argv: list[str], said: str, aliases: dict[str, str]) -> list[str] | None:
    """The command without the field that nvidia-smi has refused, or with the field's other name."""
    found = re.search(r'Field "([^"]+)" is not a valid field', said)
    if found is None:
        return None
    name, changed = found[1], []
    for word in argv:
        option, equals, value = word.partition("=")
        fields = value.split(",")
        if equals and name in fields:
            other = aliases.get(name)
            kept = [other if field == name else field for field in fields if field != name or other]
            if not kept:
                return None
            word = option + "=" + ",".join(str(field) for field in kept)
        changed.append(word)
    return changed if changed != argv else None


def python_of(args: dict[str, Any]) -> dict[str, Any]:
    """The workers' interpreter: the profile's, or the newest environment that a launch has built."""
    if not args["build"]:
        return {"python": os.path.expanduser(args["python"]) if args["python"] else sys.executable}
    root = os.path.join(expand(args["work_dir"]), "env")
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            with contextlib.suppress(OSError):
                found.append((os.stat(os.path.join(root, name, "complete.json")).st_mtime, name))
    if not found:
        return {"unbuilt": root}
    return {"python": os.path.join(root, max(found)[1], "bin", "python")}


def worker(args: dict[str, Any]) -> dict[str, Any]:
    """A program in the workers' interpreter; it gets JSON as its last word and prints an answer behind a marker."""
    there = python_of(args)
    if "unbuilt" in there:
        return there
    marker = os.urandom(8).hex()
    request = json.dumps({**args["args"], "marker": marker})
    began = time.monotonic()
    told = run([there["python"], "-c", args["code"], request], args, args["timeout_s"])
    for line in told["out"].splitlines():
        if line.startswith(marker):
            answer = json.loads(line[len(marker) :])
            return {**answer, "python": there["python"], "took_s": time.monotonic() - began}
    if told["late"]:
        return {"error": f"{there['python']} was not done within {args['timeout_s']:.0f} s", "late": True}
    if told["missing"]:
        return {"error": f"there is no {there['python']} (PATH there: {told['path']})"}
    said = [line for line in (told["err"] or told["out"]).splitlines() if line.strip()]
    return {"error": f"{there['python']}: {said[-1] if said else 'it said nothing'}"[:400]}


def system(args: dict[str, Any]) -> dict[str, Any]:
    """What this node is and what a process may use here."""
    began = time.time()
    setup = run(["true"], args, 20.0)
    memory = dict(re.findall(r"(\w+):\s+(\d+) kB", _text("/proc/meminfo")))
    shared = None
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "path": setup["path"],
        "setup_error": "" if setup["path"] else setup["err"] or "environment.setup did not end within 20 s",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(memory["MemTotal"]) * 1024 if "MemTotal" in memory else None,
        "available_bytes": int(memory["MemAvailable"]) * 1024 if "MemAvailable" in memory else None,
        "limit_bytes": _memory_limit(),
        "shm_bytes": shared,
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "rdma": sorted(_names("/sys/class/infiniband")),
        "name": socket.gethostname(),
        "clock": [began, time.time()],
    }


def _limit(which: int) -> int | None:
    """The hard limit, up to which a process may raise its own; None: without limit."""
    hard = resource.getrlimit(which)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _memory_limit() -> int | None:
    """Of the container, session or job that this process is in; of several around each other the tightest."""
    found = []
    for line in ["0::/", "0:memory:/", *_text("/proc/self/cgroup").splitlines()]:
        _, kinds, path = ([*line.split(":", 2), "", ""])[:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if kinds else ("/sys/fs/cgroup", "memory.max")
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            text = _text(os.path.join(root, *parts[:depth], name)).strip()
            if text.isdigit() and int(text) < 1 << 60:
                found.append(int(text))
    return min(found, default=None)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def free_port(args: dict[str, Any]) -> dict[str, Any]:
    """A port that can be bound here right now."""
    address = args.get("address", "127.0.0.1")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        return {"port": sock.getsockname()[1]}


def can_bind(args: dict[str, Any]) -> dict[str, Any]:
    """Can a port be bound here? If not: who holds it, as far as this user may see."""
    address, port = args["address"], args["port"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            return {"free": True}
        except OSError as error:
            held = holder(port) if error.errno == errno.EADDRINUSE else None
            return {"free": False, "error": error.strerror, "holder": held}


def holder(port: int) -> dict[str, Any] | None:
    """The process that listens at a port: pid and command, or its user's number alone."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _text(name).splitlines()[1:]:
            words = line.split()
            if int(words[1].rpartition(":")[2], 16) == port and words[3] == "0A":
                return _of_inode(words[9]) or {"uid": int(words[7])}
    return None


def _of_inode(inode: str) -> dict[str, Any] | None:
    wanted = "socket:[" + inode + "]"
    for pid in filter(str.isdigit, _names("/proc")):
        for number in _names("/proc/" + pid + "/fd"):
            with contextlib.suppress(OSError):
                if os.readlink("/proc/" + pid + "/fd/" + number) == wanted:
                    return {"pid": int(pid), "command": _command(pid)}
    return None


def _command(pid: str) -> str:
    return _text("/proc/" + pid + "/cmdline").replace("\0", " ").strip()[:120]


def dial(args: dict[str, Any]) -> dict[str, Any]:
    """Connect to each (address, port): seconds, or why not."""
    found = []
    for address, port in args["targets"]:
        began = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=args["each_s"]) as sock:
                sock.settimeout(args["each_s"])
                said = sock.recv(64).decode(errors="replace") if args.get("listen") else ""
            found.append({"seconds": time.monotonic() - began, "said": said})
        except OSError as error:
            found.append({"error": str(error.strerror or error)})
    return {"answers": found}


def listen_once(args: dict[str, Any]) -> dict[str, Any]:
    """Listen at an address of this node and greet whoever comes, for so many seconds or guests."""
    family = socket.AF_INET6 if ":" in args["address"] else socket.AF_INET
    guests = 0
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((args["address"], args["port"]))
        sock.listen(64)
        end = time.monotonic() + args["seconds"]
        while guests < args["guests"] and time.monotonic() < end:
            sock.settimeout(max(0.01, end - time.monotonic()))
            with contextlib.suppress(OSError):
                guest, _ = sock.accept()
                with guest:
                    guest.sendall(args["word"].encode())
                guests += 1
    return {"guests": guests}


def addresses(args: dict[str, Any]) -> dict[str, Any]:
    """By which addresses others may know this node: where default routes lead out, where SSH came in, its names'."""
    routed, others = [], []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # no packet is sent: connecting a datagram socket only asks the routing table which address would be used
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            routed.append(sock.getsockname()[0])
    for name in filter(None, (os.environ.get("SLURMD_NODENAME"), socket.gethostname())):
        with contextlib.suppress(OSError):
            others += [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(["hostname", "-I"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        others += told.stdout.decode(errors="replace").split()
    local = [one for one in others if one.startswith(("127.", "fe80")) or one == "::1"]
    found = [one for one in dict.fromkeys(others) if one not in local and one not in routed]
    came_in = [one for one in os.environ.get("SSH_CONNECTION", "").split()[2:3] if "%" not in one]
    others = [*found, "127.0.0.1"]  # the last for nodes that are one machine
    return {"routed": routed, "came_in": came_in, "others": others}


def routes(args: dict[str, Any]) -> dict[str, Any]:
    """By which address and interface this node reaches each of its peers; no packet is sent."""
    import fcntl
    import struct

    names = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            packed = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            names[socket.inet_ntoa(packed[20:24])] = name
    found = []
    for peer in args["peers"]:
        try:
            resolved = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(resolved[0], socket.SOCK_DGRAM) as sock:
                sock.connect(resolved[4])
                own = sock.getsockname()[0]
            found.append({"peer": peer, "address": own, "interface": names.get(own, "")})
        except OSError as error:
            found.append({"peer": peer, "error": str(error.strerror or error)})
    return {"routes": found, "name": socket.gethostname()}


def leftovers(args: dict[str, Any]) -> dict[str, Any]:
    """Processes of islandctl's runs that live on this node, by run."""
    found: dict[str, list[int]] = {}
    for pid in filter(str.isdigit, _names("/proc")):
        run_of = re.search(r"(?:^|\0)ISLANDCTL_RUN=([^\0]*)", _text("/proc/" + pid + "/environ"))
        if run_of is not None and run_of[1] != args["mark"]:
            found.setdefault(run_of[1], []).append(int(pid))
    return {"runs": found}
