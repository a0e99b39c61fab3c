"""Whole runs on this machine, as a user starts them: commands, files, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The emulated link sets the pace: a window takes seconds on any machine, so that there is time to break things.
RECIPE = """
name: tiny
model: {kind: moe, layers: 2, width: 32, heads: 2, hidden: 32, experts: 4, active_experts: 2}
data: {paths: [python-stdlib], limit_bytes: 300000}
training:
  steps: STEPS
  batch: 2
  sequence: 64
  optimizer: {lr: 3e-3}
  schedule: {warmup: 5}
exchange: {window: 20, fragments: 2, overlap: 2, chunk: 4096, late: {deadline: 30 s}}
checkpoint: {every: 20}
evaluation: {every: 20, sequences: 4}
worker: {restart: {backoff: 200 ms}}
relay: {emulate: {bandwidth: 100 Mbit/s, rtt: 150 ms}}
"""

SITE = """
name: NAME
WHERE
gpu: {type: cpu, count: 1, per_node: 1}
cpu: {cores: 1, memory: 2 GiB}
wan: {up: 1 Gbit/s, down: 1 Gbit/s, rtt: 1 ms}
environment: {build: false, python: PYTHON}
work_dir: WORK
"""


class Machine:
    """A folder that plays the user's machine and both sites."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {**os.environ, "ISLANDCTL_HOME": str(root / "home"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        for name in ("east", "west"):
            self.site(name, "scheduler: local")

    def site(self, name: str, where: str, python: str = "python3") -> None:
        """Write a site's profile; ``where`` is the part that says how it is reached."""
        values = {"NAME": name, "WHERE": where, "WORK": str(self.root / "work dir" / name), "PYTHON": python}
        text = SITE
        for word, value in values.items():
            text = text.replace(word, value)
        (self.root / f"{name}.yaml").write_text(text)

    def recipe(self, steps: int) -> Path:
        """A recipe of so many steps."""
        path = self.root / "tiny.yaml"
        path.write_text(RECIPE.replace("STEPS", str(steps)))
        return path

    def islandctl(self, *args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """One command, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "islandctl", *args],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def begin(self, *args: str) -> subprocess.Popen[str]:
        """One command, begun; its output comes line by line."""
        return subprocess.Popen(
            [sys.executable, "-m", "islandctl", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def arguments(self, steps: int, run: str) -> list[str]:
        """What ``launch`` takes to run so many steps on both sites."""
        sites = [part for name in ("east", "west") for part in ("--site", str(self.root / f"{name}.yaml"))]
        return [str(self.recipe(steps)), *sites, "--run", run]

    def launch(self, steps: int, run: str, *options: str) -> subprocess.CompletedProcess[str]:
        """``islandctl launch`` on both sites."""
        return self.islandctl("launch", *self.arguments(steps, run), *options)

    def status(self, run: str) -> dict[str, Any]:
        """``islandctl status --json``."""
        done = self.islandctl("status", run, "--json")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def until(self, run: str, good: Callable[[dict[str, Any]], bool], *, deadline_s: float = 90.0) -> dict[str, Any]:
        """Look until ``good``; fails with the last look when it never is."""
        end = time.monotonic() + deadline_s
        while True:
            seen = self.status(run)
            if good(seen):
                return seen
            assert time.monotonic() < end, json.dumps(seen, indent=1)
            time.sleep(0.3)

    def processes(self, run: str) -> dict[int, str]:
        """Every process that carries the run's mark: pid → command line."""
        mark = json.loads((self.root / "home" / "runs" / run / "run.json").read_text())["mark"]
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environ = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"ISLANDCTL_RUN={mark}".encode() in environ and command:
                found[int(folder.name)] = command
        return found

    def workers(self, run: str, cell: str) -> list[int]:
        """Worker processes of one cell, without torchrun and supervisor."""
        return [
            pid
            for pid, command in self.processes(run).items()
            if "islandctl.worker" in command and f"/{cell}" in command and "torch.distributed" not in command
        ]


def steps_of(status: dict[str, Any]) -> list[int]:
    """Step of every cell; -1 where it is not known."""
    return [-1 if cell["step"] is None else cell["step"] for cell in status["cells"]]
