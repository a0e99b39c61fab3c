"""Whole runs on this machine, as a user starts them: commands, files, processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from islandctl.ledger.entries import ENTRY, Entry
from islandctl.ledger.joint import joint_checkpoints
from islandctl.ledger.packet import unpack

# The emulated link sets the pace: a window takes seconds on any machine, so that there is time to break things.
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "kind": "moe",
        "layers": 2,
        "width": 32,
        "heads": 2,
        "hidden": 32,
        "experts": 4,
        "active_experts": 2,
    },
    "data": {"paths": ["python-stdlib"], "limit_bytes": 300000},
    "training": {
        "steps": 60,
        "batch": 2,
        "sequence": 64,
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup": 5},
    },
    "exchange": {"window": 20, "fragments": 2, "overlap": 2, "chunk": 4096, "late": {"deadline": "30 s"}},
    "checkpoint": {"every": 20},
    "evaluation": {"every": 20, "sequences": 4},
    "worker": {"restart": {"backoff": "200 ms"}},
    "relay": {"emulate": {"bandwidth": "100 Mbit/s", "rtt": "150 ms"}},
}

SITE: dict[str, Any] = {
    "scheduler": "local",
    "gpu": {"type": "cpu", "count": 1, "per_node": 1},
    "cpu": {"cores": 1, "memory": "2 GiB"},
    "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "1 ms"},
    "environment": {"build": False, "python": "python3"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, section by section."""
    both = dict(base)
    for key, value in changes.items():
        both[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return both


class Machine:
    """A folder that plays the user's machine and both sites."""

    def __init__(self, root: Path, recipe: dict[str, Any] | None = None) -> None:
        self.root = root
        self.env = {**os.environ, "ISLANDCTL_HOME": str(root / "home"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self.changes = recipe or {}
        """What the recipe of this machine has otherwise than RECIPE."""
        self.begun: list[subprocess.Popen[str]] = []
        for name in ("east", "west"):
            self.site(name)

    @property
    def runs(self) -> Path:
        """The folder of all runs' records."""
        return self.root / "home" / "runs"

    def site(self, name: str, **changes: Any) -> Path:
        """Write a site's profile; ``changes`` are laid over SITE. JSON is YAML."""
        path = self.root / f"{name}.yaml"
        profile = {"name": name, "work_dir": str(self.root / "work dir" / name)}
        path.write_text(json.dumps(merged(SITE | profile, changes), indent=1))
        return path

    def recipe(self, steps: int, **changes: Any) -> Path:
        """A recipe of so many steps."""
        path = self.root / "tiny.yaml"
        whole = merged(merged(RECIPE, self.changes), merged({"training": {"steps": steps}}, changes))
        path.write_text(json.dumps(whole, indent=1))
        return path

    def islandctl(self, *args: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """One command, to its end. It must never show a traceback."""
        done = subprocess.run(
            [sys.executable, "-m", "islandctl", *args],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert "fault of islandctl" not in done.stderr, done.stderr
        return done

    def begin(self, *args: str) -> subprocess.Popen[str]:
        """One command, begun; its output comes line by line. It ends with ``ending`` at the latest."""
        begun: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "islandctl", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.begun.append(begun)
        return begun

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
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def until(self, run: str, good: Callable[[dict[str, Any]], bool], *, deadline_s: float = 300.0) -> dict[str, Any]:
        """Look until ``good``; fails with the last look when it never is."""
        end = time.monotonic() + deadline_s
        while True:
            seen = self.status(run)
            if good(seen):
                return seen
            assert time.monotonic() < end, json.dumps(seen, indent=1)
            time.sleep(0.8)  # a look costs half a second of processor time

    # What lies on disk

    def cell(self, run: str, name: str) -> Path:
        """A cell's folder; both sites' work folders lie on this machine."""
        record = json.loads((self.runs / run / "run.json").read_text())
        return next(Path(cell["nodes"][0]["cell_folder"]) for cell in record["cells"] if cell["name"] == name)

    def ledger(self, run: str) -> list[Entry]:
        """The ledger as it is on disk; a line that is still being written is left out."""
        path = self.runs / run / "relay" / "ledger.jsonl"
        *lines, _ = (path.read_bytes() if path.exists() else b"").split(b"\n")
        return [ENTRY.validate_json(line) for line in lines]

    def joint_steps(self, run: str) -> list[int]:
        """Steps of the joint checkpoints."""
        return [one.step for one in joint_checkpoints(self.ledger(run), 2)]

    def until_joint(self, run: str, step: int, *, deadline_s: float = 300.0) -> None:
        """Return right after the joint checkpoint of ``step``, without asking anybody."""
        end = time.monotonic() + deadline_s
        while max(self.joint_steps(run), default=0) < step:
            assert time.monotonic() < end, self.islandctl("status", run).stdout
            time.sleep(0.02)

    def until_trained(
        self, run: str, step: int, *, cells: Sequence[str] = ("east", "west"), deadline_s: float = 300.0
    ) -> None:
        """Return right after all cells have trained so many steps, without asking anybody."""
        end = time.monotonic() + deadline_s
        while min(max(self.losses(run, cell), default=0) for cell in cells) < step:
            assert time.monotonic() < end, self.islandctl("status", run).stdout
            time.sleep(0.02)

    def metrics(self, run: str, name: str, kind: str) -> list[dict[str, Any]]:
        """Lines of ``kind`` of one cell, as its file has them."""
        path = self.cell(run, name) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def losses(self, run: str, name: str) -> dict[int, float]:
        """Training loss of every step; of a step that was repeated the last one."""
        return {line["step"]: line["loss"] for line in self.metrics(run, name, "train")}

    def packets(self, run: str) -> dict[tuple[int, int, int, int], set[str]]:
        """(cell, fragment, window, chunk) → payload hashes of all attempts, of the packets in the relay's store."""
        found: dict[tuple[int, int, int, int], set[str]] = {}
        for path in (self.runs / run / "relay" / "packets").glob("*/*/*/*"):
            header, _ = unpack(path.read_bytes())
            key = (header.cell, header.fragment, header.window, header.chunk)
            found.setdefault(key, set()).add(header.payload_hash)
        return found

    def bases(self, run: str) -> dict[tuple[int, int, int], set[str]]:
        """(fragment, chunk, version) → hashes of anchor and outer momentum that the cells' packets build on."""
        found: dict[tuple[int, int, int], set[str]] = {}
        for path in (self.runs / run / "relay" / "packets").glob("*/*/*/*"):
            header, _ = unpack(path.read_bytes())
            found.setdefault((header.fragment, header.chunk, header.version), set()).add(header.base)
        return found

    # Processes

    def processes(self, run: str) -> dict[int, str]:
        """Every process that carries the run's mark: pid → command line."""
        mark = json.loads((self.runs / run / "run.json").read_text())["mark"]
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
        return self.find(run, "islandctl.worker", f"/{cell}", no="torch.distributed")

    def find(self, run: str, *words: str, no: str = "\0") -> list[int]:
        """Processes of the run whose command line holds all ``words`` and not ``no``."""
        return [
            pid for pid, line in self.processes(run).items() if all(word in line for word in words) and no not in line
        ]

    def kill(self, run: str, *words: str, no: str = "\0") -> list[int]:
        """kill -9 of what ``find`` finds; fails when that is nothing."""
        found = self.find(run, *words, no=no)
        assert found, (words, self.processes(run))
        kill(found)
        return found

    def kill_everything(self, run: str) -> None:
        """kill -9 of every process of the run, until none is left: what one starts meanwhile dies too."""
        while left := self.processes(run):
            # the keepers first, so that nobody starts anything again
            kill(sorted(left, key=lambda pid: "supervisor.py" not in left[pid]))


def kill(pids: Iterable[int]) -> None:
    """kill -9; one that has ended meanwhile is no matter."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def ending(machine: Machine) -> Iterator[Machine]:
    """Whatever happens, nothing of the machine's runs is left running."""
    try:
        yield machine
    finally:
        for command in machine.begun:
            command.kill()
            command.communicate()
        for folder in machine.runs.glob("*"):
            if (folder / "run.json").exists():
                machine.kill_everything(folder.name)


def steps_of(status: dict[str, Any]) -> list[int]:
    """Step of every cell; -1 where it is not known."""
    return [-1 if cell["step"] is None else cell["step"] for cell in status["cells"]]


def as_planned(machine: Machine, run: str) -> None:
    """A finished run of two cells has sent and fetched what its plan said, to 1 %, within the memory that it said."""
    told = machine.islandctl("plan", "--from-run", run, "--json")
    assert told.returncode == 0, told.stderr
    rows = {(one["cell"], one["name"]): one for one in json.loads(told.stdout)["comparisons"]}
    for cell in ("east", "west"):
        assert rows[cell, "memory"]["within"] is True, rows[cell, "memory"]
        for way in ("sent", "fetched"):
            row = rows[cell, way]
            assert abs(row["measured"] - row["planned"]) <= 0.01 * row["planned"], row
        assert rows[cell, "exchange"]["measured"] > rows[cell, "exchange"]["low"]
        assert rows[cell, "step"]["measured"] > 0
