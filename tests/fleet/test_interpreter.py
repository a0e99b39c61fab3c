"""The Python that stays on a host, here at the end of a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.fleet import wire
from islandctl.fleet.interpreter import Gone, Interpreter

NOISE = "import sys; sys.stdout.write('hello from .bashrc\\n'); sys.stdout.flush(); "


class Piped:
    """A stream to a process that is begun as a login shell would."""

    def __init__(self, noise: str = NOISE) -> None:
        argv = [sys.executable, "-I", "-S", "-c", noise + wire.BOOT]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()

    def sendall(self, data: bytes, /) -> None:
        while data:
            data = data[os.write(self._in, data) :]

    def recv(self, size: int, /) -> bytes:
        return os.read(self._out, size)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


TICKING = """
import os, time
parent = os.getpid()
if not os.fork():
    while os.getppid() == parent:
        os.write(1, b"tick\\n\\xff")
        time.sleep(0.001)
    os._exit(0)
"""
"""What a file of the login shell may leave running."""


@pytest.fixture
def piped() -> Iterator[Piped]:
    stream = Piped()
    yield stream
    stream.process.kill()
    for thread in threading.enumerate():
        if thread.name == "interpreter":
            thread.join(20)  # it reads from a number that the next test's stream may get
    with stream.process:
        pass


def test_calls_run_side_by_side_and_one_that_dies_touches_no_other(piped: Piped, tmp_path: Path) -> None:
    python = Interpreter(piped)
    echo = "def main(args, payload):\n    print('noise')\n    return [args, len(payload)]"
    assert python.call(echo, {"a": "ü"}, b"x" * 300_000, 20.0) == {"result": [{"a": "ü"}, 300_000]}
    wait = "import os, time\ndef main(args, payload):\n    while not os.path.exists(args['gate']): time.sleep(0.01)"
    answers: dict[str, Any] = {}
    gate = {"gate": str(tmp_path / "gate")}
    waiting = threading.Thread(target=lambda: answers.update(python.call(wait, gate, b"", 60.0)))
    waiting.start()
    kill = "import os\ndef main(args, payload): os.kill(os.getpid(), args['number'])"
    assert python.call(kill, {"number": signal.SIGKILL}, b"", 20.0) == {"died": -9}
    assert python.call("import os\ndef main(args, payload): os._exit(7)", {}, b"", 20.0) == {"died": 7}
    raised = python.call("def main(args, payload):\n    open('/no/such')", {}, b"", 20.0)
    assert (raised["error"], raised["line"], raised["errno"]) == ("FileNotFoundError", 2, 2)
    assert python.call("import no_such_module", {}, b"", 20.0)["error"] == "ModuleNotFoundError"
    assert answers == {}
    (tmp_path / "gate").touch()
    waiting.join(60)
    assert answers == {"result": None}
    large = "def main(args, payload): return 'x' * 3_000_000"
    assert len(python.call(large, {}, b"", 20.0)["result"]) == 3_000_000


def test_what_a_call_leaves_behind_keeps_nobody_waiting(piped: Piped) -> None:
    python = Interpreter(piped)
    leave = "import os, time\ndef main(args, payload):\n    pid = os.fork()\n    return pid or time.sleep(60)"
    pid = python.call(leave, {}, b"", 20.0)["result"]
    os.kill(pid, signal.SIGKILL)
    assert python.call("def main(args, payload): return 1", {}, b"", 20.0) == {"result": 1}


def test_the_end_of_it_is_told_to_all_who_wait(piped: Piped) -> None:
    python = Interpreter(piped)
    started = python.call("import os\ndef main(args, payload): return os.getppid()", {}, b"", 20.0)["result"]
    assert started == piped.process.pid
    with pytest.raises(TimeoutError):
        python.call("import time\ndef main(args, payload): time.sleep(60)", {}, b"", 0.2)
    threading.Timer(0.3, piped.process.kill).start()
    with pytest.raises(Gone):
        python.call("import time\ndef main(args, payload): time.sleep(60)", {}, b"", 30.0)
    assert not python.alive
    with pytest.raises(Gone):
        python.call("def main(args, payload): return 1", {}, b"", 5.0)


def test_it_gives_way_when_nothing_is_asked(piped: Piped) -> None:
    python = Interpreter(piped)
    python.call("def main(args, payload): return 1", {}, b"", 20.0)
    python.close_if_idle()
    assert piped.process.wait(20) == 0
    assert not python.alive


def test_what_prints_all_the_time_is_passed_over() -> None:
    stream = Piped(TICKING)
    try:
        python = Interpreter(stream)
        for number in range(200):
            answer = python.call("def main(args, payload): return args['number']", {"number": number}, b"", 60.0)
            assert answer == {"result": number}
    finally:
        stream.process.kill()
        stream.process.communicate()


def test_an_answer_that_something_else_printed_into_is_told_as_such(piped: Piped) -> None:
    python = Interpreter(piped)
    spoil = """
import os
def main(args, payload):
    with open("/proc/%d/fd/1" % os.getppid(), "wb", buffering=0) as out:
        out.write(args["marker"].encode() + b"7 1000\\n" + b"x" * 1000)
"""
    with pytest.raises(Gone, match="mixed with what something else prints there"):
        python.call(spoil, {"marker": python._marker.decode()}, b"", 60.0)
