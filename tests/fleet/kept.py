"""A supervisor folder in a test, with a real supervisor and a real child."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from islandctl.fleet import node, supervisor
from islandctl.fleet.job import RestartPolicy, SupervisorJob, SupervisorState
from islandctl.fleet.local import LocalHost

SCRIPT = Path(supervisor.__file__)
HOST = LocalHost()
QUICK = RestartPolicy(limit=3, backoff_s=0.05, backoff_limit_s=0.1)


def until(met: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until something holds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := met():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class Kept:
    """One supervisor folder in a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "cell a" / "node-0"
        self.mark = f"mark-{os.getpid()}-{root.name}"
        self.script, self.python = SCRIPT, sys.executable

    def job(self, program: str, **more: Any) -> SupervisorJob:
        settings: dict[str, Any] = {
            "run": "test",
            "mark": self.mark,
            "name": "cell a/node-0",
            "argv": (sys.executable, "-c", textwrap.dedent(program)),
            "cwd": str(self.root),
            "env": {"ROOT": str(self.root)},
            "restart": QUICK,
            "stop_timeout_s": 0.3,
            **more,
        }
        return SupervisorJob(**settings)

    def start(self, program: str, **more: Any) -> int:
        return node.start(HOST, str(self.script), self.python, self.folder.as_posix(), self.job(program, **more))

    def patch(self, **constants: Any) -> None:
        """Start supervisors with other values of these constants: what takes minutes then takes a moment."""
        text = SCRIPT.read_text()
        for name, value in constants.items():
            text, found = re.subn(rf"^{name} = .*$", lambda _, n=name, v=value: f"{n} = {v!r}", text, flags=re.M)
            assert found == 1, name
        self.script = self.root / "patched.py"
        self.script.write_text(text)

    @property
    def state(self) -> SupervisorState:
        return SupervisorState(**supervisor.states([str(self.folder)])[0])

    def ended(self) -> SupervisorState:
        until(lambda: self.state.state == "ended", "the end")
        return node.state(HOST, self.folder.as_posix())

    def written(self, name: str) -> str:
        return until(lambda: (self.root / name).exists() and (self.root / name).read_text(), f"file {name}")

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "node-0.log").read_text()

    def left(self) -> list[dict[str, Any]]:
        return supervisor.leftovers(self.mark)


FOREVER = "import time\nopen('ready', 'w').write('1')\ntime.sleep(600)"
