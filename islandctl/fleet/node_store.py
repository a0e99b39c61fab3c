"""Contents on a node, each in ``store/`` under its sha256. Standard library only, Python 3.8 or newer: sent as text.

A content comes from the controller (``receive``) or from a node of the same site (``serve`` there, ``fetch`` here).
What has arrived lies in ``HASH.part`` and is gone on from; it counts once its hash is right and it is renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import socket

IDLE_S = 60
"""Without a byte for so long a transfer is given up; what has arrived stays."""
CONNECT_S = 5.0
BLOCK = 1 << 18


def expand(path: str) -> str:
    """``~`` is the node's own home."""
    return os.path.abspath(os.path.expanduser(path))


def place(work_dir: str, name: str) -> str:
    """Where a content lies."""
    return os.path.join(expand(work_dir), "store", name)


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    """One at a time; waits for another one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise OSError(
                        error.errno, "file locks do not work on this file system (Lustre: -o flock)"
                    ) from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another launch has held {path} for {timeout_s:.0f} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def have(args: dict[str, Any], _: bytes = b"") -> list[int]:
    """Of each content how many bytes are here; -1: all of it."""
    found = []
    for name in args["contents"]:
        path = place(args["work_dir"], name)
        if os.path.isfile(path):
            found.append(-1)
        else:
            found.append(os.path.getsize(path + ".part") if os.path.isfile(path + ".part") else 0)
    return found


def arrive(path: str, name: str, size: int, offset: int, read: Callable[[int], bytes]) -> int:
    """Add what ``read`` gives to the part that lies here from ``offset`` on; how many bytes are here then, -1: all.

    Raises:
        ValueError: all is here, and it is not what was promised; it is thrown away.
    """
    part = path + ".part"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with locked(path + ".lock", IDLE_S + 30.0):
        if os.path.isfile(path):
            return -1
        at = os.path.getsize(part) if os.path.isfile(part) else 0
        if at != offset:
            return at  # another launch was here meanwhile
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
                while at < size:
                    data = read(min(BLOCK, size - at))
                    if not data:
                        return at
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    at += len(data)
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.unlink(part)  # it would keep a full disk full
            raise
        if digest(part) != name:
            os.unlink(part)
            raise ValueError(f"content {name[:16]} arrived damaged")
        os.rename(part, path)
        return -1


def digest(path: str) -> str:
    """sha256 of a file."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return total.hexdigest()


def receive(args: dict[str, Any], stream: BinaryIO) -> int:
    """Take a content from stdin; see ``arrive``."""

    def read(most: int) -> bytes:
        signal.alarm(IDLE_S)  # by default it ends this process: the link may be gone without a word
        data = stream.read(most)
        signal.alarm(IDLE_S)
        return data

    path = place(args["work_dir"], args["content"])
    try:
        return arrive(path, args["content"], args["size"], args["offset"], read)
    finally:
        signal.alarm(0)


# From node to node ----------------------------------------------------------------------------------------------


def proof(token: str, nonce: bytes, asked: bytes) -> bytes:
    """Shows that the asker knows the token, without telling it."""
    import hmac  # here, as below: few nodes need it, and loading takes time on each

    return hmac.new(token.encode(), nonce + asked, hashlib.sha256).hexdigest().encode()


def serve(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Give contents to whoever knows the token, in the background, until ``hush`` or the end of the lease."""
    import socket

    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    else:
        listener = socket.create_server(("", 0), backlog=64)
    ticket = place(args["work_dir"], args["ticket"])
    with open(ticket, "w"):
        pass
    answer = {"port": listener.getsockname()[1], "addresses": addresses()}
    if os.fork():
        listener.close()
        return answer
    try:
        os.setsid()
        signal.alarm(int(args["lease_s"]))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != listener.fileno():
                with contextlib.suppress(OSError):
                    os.close(int(name))
        give(listener, args, ticket)
    finally:
        os._exit(0)


def give(listener: socket.socket, args: dict[str, Any], ticket: str) -> None:
    """Answer askers, each in a thread, for as long as the ticket lies there."""
    import threading

    listener.settimeout(0.5)
    while os.path.exists(ticket):
        try:
            asker, _ = listener.accept()
        except OSError:
            continue
        threading.Thread(target=hand_out, args=(asker, args), daemon=True).start()


def hand_out(asker: socket.socket, args: dict[str, Any]) -> None:
    """Give one content from an offset on, if the asker knows the token."""
    import hmac

    with contextlib.suppress(OSError, ValueError), asker:
        asker.settimeout(IDLE_S)
        nonce = os.urandom(16).hex().encode()
        asker.sendall(nonce + b"\n")
        shown, _, asked = line(asker).partition(b" ")
        if not hmac.compare_digest(shown, proof(args["token"], nonce, asked)):
            return
        name, offset = asked.decode().split()
        if name not in args["contents"]:
            return
        with open(place(args["work_dir"], name), "rb") as file:
            asker.sendfile(file, int(offset))


def line(sock: socket.socket) -> bytes:
    """A short line, without what comes after it."""
    text = b""
    while not text.endswith(b"\n") and len(text) < 300:
        text += sock.recv(1) or b"\n"
    return text[:-1]


def hush(args: dict[str, Any], _: bytes) -> None:
    """Have the server of this ticket end."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place(args["work_dir"], args["ticket"]))


def fetch(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Take a content from another node. ``here``: bytes that are here then, -1: all; ``trouble``: why not all."""
    import socket

    path, name = place(args["work_dir"], args["content"]), args["content"]
    offset, trouble = have({"work_dir": args["work_dir"], "contents": [name]})[0], "it told no address"
    for address in args["addresses"] if offset >= 0 else ():
        try:
            with socket.create_connection((address, args["port"]), timeout=CONNECT_S) as sock:
                sock.settimeout(IDLE_S)
                nonce = line(sock)
                asked = f"{name} {offset}".encode()
                sock.sendall(proof(args["token"], nonce, asked) + b" " + asked + b"\n")
                offset = arrive(path, name, args["size"], offset, sock.recv)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            trouble = f"{address} port {args['port']}: {getattr(error, 'strerror', None) or error}"
            offset = have({"work_dir": args["work_dir"], "contents": [name]})[0]
            continue
        if offset == -1:
            break
        trouble = f"{address} port {args['port']}: it ended after {offset} bytes"
    return {"here": offset, "trouble": "" if offset == -1 else trouble}


def addresses() -> list[str]:
    """Where other nodes may reach this one: where SSH came in, the way out, and what its name means."""
    import socket

    found = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # nothing is sent: connecting a datagram socket only asks the routing table
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            found.append(sock.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(told[4][0]) for told in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))[:6]


# Shared folders -------------------------------------------------------------------------------------------------


def identity(work: str) -> str:
    """A text that belongs to this work folder, wherever it is mounted; made by whoever comes first."""
    path = os.path.join(work, ".identity")
    aside = f"{path}.{os.urandom(4).hex()}"
    if not os.path.exists(path):
        with open(aside, "w") as file:
            file.write(os.urandom(16).hex())
        with contextlib.suppress(OSError):  # no hard links, or somebody was faster
            os.link(aside, path)
        os.unlink(aside)
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def leave(args: dict[str, Any], _: bytes) -> None:
    """Leave a sign in the work folder, for ``see`` on another node."""
    os.makedirs(place(args["work_dir"], ""), exist_ok=True)
    with open(place(args["work_dir"], "sign-" + args["sign"]), "w") as file:
        file.flush()
        os.fsync(file.fileno())


def see(args: dict[str, Any], _: bytes) -> bool:
    """Whether the sign that another node has left is here: then both have the same folder."""
    deadline = time.monotonic() + args["patience_s"]
    while True:
        with contextlib.suppress(OSError):
            if "sign-" + args["sign"] in os.listdir(place(args["work_dir"], "")):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)  # NFS remembers for a while that a name is not there


def clear(args: dict[str, Any], _: bytes) -> None:
    """Take the sign away."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place(args["work_dir"], "sign-" + args["sign"]))


def main(args: dict[str, Any], payload: Any) -> Any:
    """Entry for ``Host.python`` and ``Host.feed``: ``do`` names the function."""
    functions = (have, receive, serve, hush, fetch, leave, see, clear)
    return {function.__name__: function for function in functions}[args["do"]](args, payload)
