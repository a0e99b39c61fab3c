"""Results on disk: one small JSON a run, named by the hash of its settings. Only whole runs are there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.experiments.equal_compute_lib.settings import Run
from scripts.experiments.equal_compute_lib.train import train


class Cache:
    """Results under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, run: Run) -> Path:
        """Where the result of ``run`` lies, or would."""
        return self.folder / f"{run.key}.json"

    def get(self, run: Run) -> dict[str, Any] | None:
        """The result, if there is one."""
        path = self.path(run)
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())["result"]
        return found

    def __iter__(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Every run that is kept, and its result."""
        for path in sorted(self.folder.glob("*.json")):
            found = json.loads(path.read_text())
            yield Run.model_validate(found["settings"]), found["result"]

    def put(self, run: Run, result: dict[str, Any]) -> None:
        """Keep a result; whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.path(run).with_suffix(f".{os.getpid()}.tmp")
        content = {"settings": run.told(), "commit": commit(), "result": result}
        aside.write_text(json.dumps(content, indent=1) + "\n")
        aside.replace(self.path(run))

    def result(self, run: Run, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """From disk, or trained now."""
        found = self.get(run)
        if found is None:
            found = train(run, tell)
            self.put(run, found)
        return found


def commit() -> str | None:
    """The commit that this code is at; None: not in a repository."""
    place = Path(__file__).parent
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=place, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
