"""How a Python program travels to a host and its result comes back, whatever shell and noise lie between.

The command line is fixed and free of anything that sh, csh or fish would touch; program, arguments and payload come
on stdin; the answer lies between random markers, so that a banner or a ``.bashrc`` that prints is not taken for it.
"""

from __future__ import annotations

import base64
import errno
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet.host import Completed, Host

_EATEN = "invalid literal for int()"
"""What BOOT says when somebody has taken away the beginning of what it is sent."""

BOOT = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
"""Holds no character that any login shell changes inside double quotes."""

HOME = """
import os
home = os.environ.get("HOME", "")
if not home.isascii() and not os.path.isdir(home):
    try:
        home = os.fsdecode(os.fsencode(home).decode().encode("latin-1"))
        os.environ["HOME"] = home if os.path.isdir(home) else os.environ["HOME"]
    except ValueError:
        pass
"""
"""First thing there: fish under LANG=C hands on a home with an é as if its bytes were Latin-1, encoded once more."""

_STAGE = """
import json, os, signal, sys
i = sys.stdin.buffer
request = json.loads(i.read(int(i.readline())).decode())
payload = i if request["stream"] else i.read(request["payload_bytes"])
if not request["stream"] and len(payload) != request["payload_bytes"]:
    sys.exit(9)
signal.alarm(request["alarm_s"])
answer_fd = os.dup(1)
os.dup2(2, 1)
if not request["stream"]:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
try:
    scope = {"__name__": "islandctl_remote"}
    exec(compile(request["source"], "<islandctl>", "exec"), scope)
    answer = {"result": scope["main"](request["args"], payload)}
except BaseException as error:
    tb, line = error.__traceback__, 0
    while tb is not None:
        line = tb.tb_lineno if tb.tb_frame.f_code.co_filename == "<islandctl>" else line
        tb = tb.tb_next
    answer = {"error": type(error).__name__, "message": str(error), "line": line,
              "errno": getattr(error, "errno", None)}
text = "\\n%s %s\\n" % (request["begin"], json.dumps(answer) + request["end"])
with os.fdopen(answer_fd, "wb") as out:
    out.write(text.encode())
"""

_RUN = """
import base64, subprocess
def main(args, payload):
    try:
        done = subprocess.run(args["argv"], input=payload, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=args["timeout_s"], cwd=args.get("cwd"))
    except subprocess.TimeoutExpired:
        return {"timeout": True}
    except OSError as error:
        return {"code": 127, "out": "", "err": base64.b64encode(str(error).encode()).decode()}
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    out, err = (base64.b64encode(data).decode() for data in (done.stdout, done.stderr))
    return {"code": code, "out": out, "err": err}
"""


ALARM_OVER_S = 2
"""Over a call's time, after which a program on the host ends itself though nobody may listen any more."""
_START_S = 10.0
"""Over a command's own time: for a Python to start on a busy node."""
_NO_ROOM = "free some space there, or set work_dir in the site profile to another disk"
_NO_RIGHT = "set work_dir in the site profile to a folder that you may write to there"
_HINTS = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: _NO_ROOM,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EAGAIN: "no more processes are allowed there: end some (ps -u $USER), or have `ulimit -u` raised",
    errno.ENOMEM: "the node's memory is used up: see there what takes it (ps aux --sort -rss)",
    errno.EMFILE: "have `ulimit -n` raised there",
}


@dataclass(frozen=True)
class Call:
    """One program on its way: what goes to stdin, and the markers of the answer."""

    stdin: bytes
    begin: str
    end: str


@cache
def program(*modules: str) -> str:
    """The text of modules of this package as one program to be sent; what they import of each other is in it."""
    lines = ["from __future__ import annotations"]
    for module in modules:
        text = (Path(__file__).parent / f"{module}.py").read_text()
        lines += [line for line in text.splitlines() if not line.startswith(("from __future__", "from islandctl."))]
    return "\n".join(lines) + "\n"


def call(source: str, args: Mapping[str, Any], payload: bytes, timeout_s: float, *, stream: bool = False) -> Call:
    """Pack a program whose ``main(args, payload)`` gives a JSON value.

    The program ends itself a little after ``timeout_s``, also when nobody listens any more.

    Args:
        stream: what follows on stdin is not read beforehand: ``payload`` is stdin itself.
    """
    begin, end = f"<<{secrets.token_hex(8)}", f"{secrets.token_hex(8)}>>"
    request = json.dumps(
        {
            "source": source,
            "args": dict(args),
            "payload_bytes": len(payload),
            "stream": stream,
            "alarm_s": int(timeout_s) + ALARM_OVER_S,
            "begin": begin,
            "end": end,
        }
    ).encode()
    stage = (HOME + _STAGE).encode()
    return Call(b"%d\n%b%d\n%b%b" % (len(stage), stage, len(request), request, payload), begin, end)


def answer(call: Call, stdout: bytes) -> dict[str, Any] | None:
    """Find the answer (``{"result": …}`` or ``{"error": …}``) in what came back; None: there is none."""
    found = re.search(
        re.escape(call.begin.encode()) + rb" (.*?)" + re.escape(call.end.encode()), stdout, flags=re.DOTALL
    )
    if found is None:
        return None
    value: dict[str, Any] = json.loads(found[1])
    return value


def result(label: str, call: Call, done: Completed, python: str = "python3") -> Any:
    """The program's result.

    Args:
        python: the interpreter, for messages.

    Raises:
        PreflightError: the program raised, there is no Python, or something else kept it from answering.
        UnreachableError: it ended without an exit code: link lost or killed, state unknown.
    """
    value = answer(call, done.stdout)
    if value is None:
        noise = last_line(done.stderr) or last_line(done.stdout) or "no output"
        raise no_answer(label, done.code, noise, python)
    return judged(label, value)


def judged(label: str, value: Mapping[str, Any]) -> Any:
    """What an answer holds.

    Raises:
        PreflightError: the program raised.
    """
    if "error" in value:
        raise _raised(label, value)
    return value["result"]


def no_answer(label: str, code: int | None, said: str, python: str) -> PreflightError | UnreachableError:
    """The error for a Python that ended without an answer. ``code`` None: lost or killed."""
    if code is None:
        return UnreachableError(
            f"{label}: the command ended without a word (link lost, or killed); state unknown",
            hint="run the command again; training on the node is not affected",
        )
    if _EATEN in said:
        return PreflightError(
            f"{label}: something on that host reads what is meant for {python}",
            hint="a `read` in a file of the login shell, as .bashrc: let it ask only where `[ -t 0 ]` holds",
        )
    return PreflightError(
        f"{label}: {python} gave no answer (exit code {code}): {said}",
        hint=f"log in by hand and type: {python} --version; is it a Python, and does the shell run it?",
    )


def _raised(label: str, value: Mapping[str, Any]) -> PreflightError:
    if value["errno"] is None:
        return PreflightError(f"{label}: {value['error']}: {value['message']} (line {value['line']})")
    return PreflightError(
        f"{label}: {re.sub(r'^.Errno [0-9]+. ', '', value['message'])}", hint=_HINTS.get(value["errno"], "")
    )


def run(host: Host, argv: Sequence[str], stdin: bytes, timeout_s: float) -> Completed:
    """``Host.run`` by means of ``Host.python``. A command killed by signal N has code 128 + N.

    Raises:
        UnreachableError: it did not end in time.
    """
    args = {"argv": list(argv), "timeout_s": timeout_s}
    value = host.python(_RUN, args, timeout_s=timeout_s + _START_S, payload=stdin)
    if value.get("timeout"):
        raise late(host.label, argv[0], timeout_s)
    return Completed(value["code"], base64.b64decode(value["out"]), base64.b64decode(value["err"]))


def late(label: str, what: str, timeout_s: float) -> UnreachableError:
    """The error of a command that did not end in time."""
    return UnreachableError(
        f"{label}: {what} gave no answer within {timeout_s:g} s; state unknown",
        hint="check the node's load and the link, then run the command again",
    )


def unknown(label: str, why: str) -> UnreachableError:
    """The error of a call of which nobody knows what it did."""
    return UnreachableError(f"{label}: {why}; state unknown", hint="mend that there, then run the command again")


def last_line(text: bytes) -> str:
    """The last line that is not empty, for messages."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
