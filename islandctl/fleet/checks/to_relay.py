"""What measures a node's way to the relay. Standard library only, Python 3.8 or newer: its text is sent there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from typing import Any

PIECE_BYTES = 64 << 10
PATH = "/v1/measure"
DRAIN_S = 60.0
"""For what tunnels and sockets on the way have taken in to come out at a slow link's end."""


def main(args: dict[str, Any], _: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    try:
        return {"trips": trips, "up": up, "down": down}[args["do"]](args)
    except (OSError, http.client.HTTPException) as error:
        return {"error": words(error)}


def words(error: Exception) -> str:
    """What went wrong, without what only a programmer wants."""
    if isinstance(error, socket.timeout):
        return "no answer"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def connect(args: dict[str, Any], timeout_s: float) -> http.client.HTTPSConnection:
    """One connection, with the run's own certificate as the only authority."""
    where = urllib.parse.urlsplit(args["url"])
    trust = ssl.create_default_context(cadata=args["certificate"])
    trust.check_hostname = False  # made for this examination alone: it proves the relay, by whatever name
    connection = http.client.HTTPSConnection(str(where.hostname), where.port, timeout=timeout_s, context=trust)
    connection.connect()
    if connection.sock is not None:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def ask(connection: http.client.HTTPSConnection, args: dict[str, Any], method: str, path: str, **more: Any) -> Any:
    """Send one request; the answer is to be read."""
    headers = {"Authorization": "Bearer " + args["token"], **more.pop("headers", {})}
    connection.request(method, path, headers=headers, **more)
    answer = connection.getresponse()
    if answer.status != 200:
        raise http.client.HTTPException(f"the relay answers {answer.status}: {answer.read(200).decode()}")
    return answer


def trips(args: dict[str, Any]) -> dict[str, Any]:
    """Seconds of so many small questions on one connection. A tunnel may need its time until it stands."""
    end = time.monotonic() + args["patience_s"]
    while True:
        try:
            connection = connect(args, 15.0)
            ask(connection, args, "GET", PATH).read()
            break
        except (OSError, http.client.HTTPException):
            if time.monotonic() > end:
                raise
            time.sleep(0.3)
    with contextlib.closing(connection):
        found: list[float] = []
        end = time.monotonic() + args["patience_s"]
        while len(found) < args["count"] and (time.monotonic() < end or not found):
            began = time.perf_counter()
            ask(connection, args, "GET", PATH).read()
            found.append(time.perf_counter() - began)
        return {"trips": found, **told(connection.sock)}


def told(sock: Any) -> dict[str, int]:
    """Linux's TCP_INFO of one connection: path MTU, segments sent, and sent again (struct tcp_info, linux/tcp.h)."""
    if not hasattr(socket, "TCP_INFO") or sock.getpeername()[0] in ("127.0.0.1", "::1"):
        return {}  # a tunnel's end on this machine tells nothing of the way
    with contextlib.suppress(OSError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        mtu, again, segments = (struct.unpack_from("=I", info, at)[0] for at in (60, 100, 136))
        return {"mtu": mtu, "again": again, "segments": segments}
    return {}


def side_by_side(args: dict[str, Any], one: Any) -> dict[str, Any]:
    """So many streams at the same time; their bytes second by second, together."""
    answers: list[dict[str, Any]] = []

    def carry() -> None:
        try:
            answers.append(one(args))
        except (OSError, http.client.HTTPException) as error:
            answers.append({"error": words(error)})

    threads = [threading.Thread(target=carry, daemon=True) for _ in range(args["streams"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(args["seconds"] + DRAIN_S + 5.0)
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed or len(answers) < len(threads):
        return {"error": failed[0] if failed else "a stream did not end"}
    length = int(args["seconds"])
    whole = [sum(answer["seconds"][at] for answer in answers if at < len(answer["seconds"])) for at in range(length)]
    totals = {key: sum(answer.get(key, 0) for answer in answers) for key in ("again", "segments")}
    return {"seconds": whole, **totals}


def up(args: dict[str, Any]) -> dict[str, Any]:
    """To the relay, which counts what arrives."""
    return side_by_side(args, _one_up)


def _one_up(args: dict[str, Any]) -> dict[str, Any]:
    block = os.urandom(PIECE_BYTES)

    def pieces() -> Any:
        end = time.monotonic() + args["seconds"]
        while time.monotonic() < end:
            yield block

    with contextlib.closing(connect(args, args["seconds"] + DRAIN_S)) as connection:
        answer = ask(
            connection,
            args,
            "POST",
            PATH,
            body=pieces(),
            encode_chunked=True,
            headers={"Transfer-Encoding": "chunked"},
        )
        counted = told(connection.sock) if connection.sock is not None else {}
        return {"seconds": json.loads(answer.read())["seconds"], **counted}


def down(args: dict[str, Any]) -> dict[str, Any]:
    """From the relay."""
    return side_by_side(args, _one_down)


def _one_down(args: dict[str, Any]) -> dict[str, Any]:
    with contextlib.closing(connect(args, args["seconds"] + DRAIN_S)) as connection:
        answer = ask(connection, args, "GET", f"{PATH}?seconds={args['seconds']:g}")
        seconds, began = [0] * int(args["seconds"]), time.monotonic()
        while True:
            piece = answer.read1(1 << 20)
            if not piece:
                return {"seconds": seconds}
            at = int(time.monotonic() - began)
            if at < len(seconds):
                seconds[at] += len(piece)
