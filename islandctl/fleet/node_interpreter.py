"""The Python that stays on a node while its connection stands. Standard library only, 3.8 or newer: sent as text.

A program is compiled once. Every call of it runs in a fork: it may hang, print, be killed or leave processes behind,
and no other call notices. Requests come on stdin, answers go to stdout (see ``interpreter.py`` for their form); what
programs print is thrown away. When stdin ends this ends, and calls that still run go on until their time is up.
"""

from __future__ import annotations

import json
import os
import select
import signal
from typing import Any


def error_of(error: BaseException) -> dict[str, Any]:
    """What is told of an exception: its kind, its words, the last line of the program that it passed."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<islandctl>" else line
        trace = trace.tb_next
    return {
        "error": type(error).__name__,
        "message": str(error),
        "line": line,
        "errno": getattr(error, "errno", None),
    }


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def framed(answer: dict[str, Any]) -> bytes:
    """An answer as a child gives it to its parent: length, then JSON."""
    text = json.dumps(answer).encode()
    return b"%d\n%b" % (len(text), text)


def fork(scope: dict[str, Any], request: dict[str, Any], payload: bytes, inherited: list[int]) -> tuple[int, int]:
    """Run one call in a child; its process id, and where its answer will come from."""
    come, go = os.pipe()
    pid = os.fork()
    if pid:
        os.close(go)
        return pid, come
    try:
        signal.alarm(request["alarm_s"])
        for descriptor in (come, *inherited):
            os.close(descriptor)
        os.dup2(2, 0)
        os.dup2(2, 1)
        try:
            answer = {"result": scope["main"](request["args"], payload)}
            text = framed(answer)
        except BaseException as error:
            text = framed(error_of(error))
        write_all(go, text)
    finally:
        os._exit(0)


def complete(answer: bytearray) -> bytes | None:
    """The JSON of an answer, once all of it is there."""
    length, found, text = bytes(answer).partition(b"\n")
    return text if found and len(text) == int(length) else None


def died(pid: int) -> bytes:
    """The answer of a child that ended without one."""
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status)
    return json.dumps({"died": -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)}).encode()


class Requests:
    """Whole requests out of what has arrived."""

    def __init__(self, arrived: bytes) -> None:
        self._arrived = bytearray(arrived)

    def add(self, data: bytes) -> None:
        """More has come."""
        self._arrived += data

    def take(self) -> tuple[int, dict[str, Any], bytes] | None:
        """The next one: its number, itself, its payload."""
        end = self._arrived.find(b"\n")
        if end < 0:
            return None
        number, size, payload_size = (int(word) for word in self._arrived[:end].split())
        whole = end + 1 + size + payload_size
        if len(self._arrived) < whole:
            return None
        request = json.loads(self._arrived[end + 1 : end + 1 + size].decode())
        payload = bytes(self._arrived[end + 1 + size : whole])
        del self._arrived[:whole]
        return number, request, payload


def serve(arrived: bytes, marker: bytes) -> None:
    """Answer until stdin ends.

    Args:
        arrived: what had come already with the text of this program.
        marker: begins each answer, since others may write to the same stream.
    """
    requests = Requests(arrived)
    texts: dict[str, str] = {}
    scopes: dict[str, Any] = {}
    children: dict[int, tuple[int, int, bytearray]] = {}  # by where the answer comes from: number, process, so far
    ended: list[int] = []
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)

    def answer(number: int, text: bytes) -> None:
        write_all(1, b"%b%d %d\n%b" % (marker, number, len(text), text))

    answer(0, b"")
    while True:
        asked = requests.take()
        if asked is not None:
            number, request, payload = asked
            program = request["program"]
            texts.setdefault(program, request.get("text", ""))
            try:
                if program not in scopes:
                    scope: dict[str, Any] = {"__name__": "islandctl_remote"}
                    exec(compile(texts[program], "<islandctl>", "exec"), scope)  # noqa: S102  # our own programs, by SSH
                    scopes[program] = scope
                pid, come = fork(scopes[program], request, payload, list(children))
                children[come] = (number, pid, bytearray())
            except BaseException as error:
                answer(number, json.dumps(error_of(error)).encode())
            continue
        ended = [pid for pid in ended if os.waitpid(pid, os.WNOHANG)[0] == 0]
        for descriptor in select.select([0, *children], [], [])[0]:
            data = os.read(descriptor, 1 << 18)
            if descriptor == 0:
                if not data:
                    os._exit(0)
                requests.add(data)
                continue
            number, pid, so_far = children[descriptor]
            so_far += data
            text = complete(so_far)
            if text is not None or not data:
                del children[descriptor]
                os.close(descriptor)
                if text is not None:
                    ended.append(pid)
                answer(number, died(pid) if text is None else text)
