"""A cell as a job of a real Slurm, with a small program in the workers' place, for tests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import islandctl
from islandctl.config.site import SiteProfile
from islandctl.fleet.job import RestartPolicy, SupervisorJob, SupervisorState
from islandctl.fleet.local import LocalHost
from islandctl.fleet.scheduler import Seat, scheduler_of
from islandctl.fleet.slurm import SlurmJobs
from tests.slurm import Cluster
from tests.sshd import site_profile

CODE = str(Path(islandctl.__file__).parents[1])
WORKER = """
import json, os, signal, sys, time
folder, steps = sys.argv[1], int(sys.argv[2])
leads = os.environ["NODE"] == "0"
saved = os.path.join(folder, "saved")
step = int(open(saved).read()) if os.path.exists(saved) else 0
def tell(outcome, retry):
    if leads:
        with open(os.path.join(folder, "outcome.json.tmp"), "w") as file:
            json.dump({"outcome": outcome, "retry": retry, "reason": "at step %d" % step}, file)
        os.replace(os.path.join(folder, "outcome.json.tmp"), os.path.join(folder, "outcome.json"))
    while not os.path.exists(os.path.join(folder, "outcome.json")):
        time.sleep(0.02)  # ranks leave together
    sys.exit(0)
def stop(*_):
    if leads:
        with open(saved, "w") as file:
            file.write(str(step))
    tell("stopped", True)
signal.signal(signal.SIGTERM, stop)
print("begins at", step, os.environ.get("PET_MASTER_ADDR"), os.environ.get("PET_MASTER_PORT"), flush=True)
while step < steps or os.path.exists(os.path.join(folder, "hold")):
    time.sleep(0.02)
    step += 1
    if leads:
        with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
            file.write(json.dumps({"attempt": 1, "step": step}) + "\\n")
tell("finished", False)
"""


class Cell:
    """A cell of some nodes, and the scheduler that keeps it."""

    def __init__(self, root: Path, slurm: Cluster, name: str, *, nodes: int = 1, **asked: Any) -> None:
        self.slurm, self.mark = slurm, f"run-{name}.0123456789abcdef"
        self.folder = root / "work" / "runs" / self.mark / "west"
        self.folder.mkdir(parents=True)
        (self.folder / "worker.py").write_text(WORKER)
        self.host = LocalHost("west/login")
        profile = site_profile(
            "west", ["login"], {}, str(root / "work"), scheduler="slurm", slurm={"partition": "low", **asked},
            gpu={"type": "cpu", "count": nodes, "per_node": 1},
        )  # fmt: skip
        self.scheduler = scheduler_of(SiteProfile.model_validate(profile))
        self.seats = [
            Seat(self.host, sys.executable, CODE, "", str(self.folder / f"node-{index}"), 1) for index in range(nodes)
        ]

    def jobs(self, steps: int) -> list[SupervisorJob]:
        return [
            SupervisorJob(
                run="run",
                mark=self.mark,
                name=f"west/node-{index}",
                argv=(sys.executable, str(self.folder / "worker.py"), str(self.folder), str(steps)),
                cwd=str(self.folder),
                env={"NODE": str(index), "ISLANDCTL_RELAY_URL": "https://relay.example:1"},
                outcome=str(self.folder / "outcome.json"),
                progress=str(self.folder / "metrics.jsonl"),
                restart=RestartPolicy(limit=1, backoff_s=0.05),
                stop_timeout_s=10,
            )
            for index in range(len(self.seats))
        ]

    def start(self, steps: int) -> None:
        self.scheduler.start(self.seats, self.jobs(steps))

    def states(self) -> list[SupervisorState]:
        assert isinstance(self.scheduler, SlurmJobs)
        self.scheduler._told.clear()  # a person looks less often than a test
        return self.scheduler.states(self.seats)

    def until(self, good: Callable[[list[SupervisorState]], bool], deadline_s: float = 90.0) -> list[SupervisorState]:
        end = time.monotonic() + deadline_s
        while not good(seen := self.states()):
            said = self.slurm.run("squeue", "-a", "-t", "all", "-o", "%i %j %T %r")
            log = self.folder / "slurm.log"
            assert time.monotonic() < end, (seen, said, log.read_text() if log.exists() else "no log")
            time.sleep(0.1)
        return seen

    def stop(self) -> None:
        self.scheduler.stop(self.seats, 20.0)

    @property
    def job(self) -> str:
        return str(json.loads((self.folder / "slurm.json").read_text())["job"])

    def log(self, node: int = 0) -> list[str]:
        return (self.folder / f"node-{node}" / "logs" / f"node-{node}.log").read_text().splitlines()


def running(seen: list[SupervisorState]) -> bool:
    return all(state.state == "running" for state in seen)


def pending(seen: list[SupervisorState]) -> bool:
    return all(state.state == "pending" for state in seen)


def ended(seen: list[SupervisorState]) -> bool:
    return all(state.state == "ended" for state in seen)
