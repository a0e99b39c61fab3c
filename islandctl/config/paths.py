"""Where things lie: the run's folder on the controller, the cell's folder on a site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

HOME_VARIABLE = "ISLANDCTL_HOME"


def home() -> Path:
    """The controller's folder: ``$ISLANDCTL_HOME``, or the platform's place for program state."""
    from platformdirs import user_state_path

    override = os.environ.get(HOME_VARIABLE)
    return Path(override).expanduser() if override else user_state_path("islandctl")


def known_hosts() -> Path:
    """Host keys that were accepted on first contact: for all runs, so that each is asked about once."""
    return home() / "known_hosts"


_PIECE = re.compile(r"(.+?)(?:\.(\d+))?\.log")


def log_piece(log: str, number: int) -> str:
    """The file name of a log's piece: ``rank-0.log``, ``rank-0.1.log``, …; a piece is never renamed."""
    return f"{log}.{number}.log" if number else f"{log}.log"


def log_pieces(names: Iterable[str]) -> dict[str, list[str]]:
    """Of each log (``rank-0``) the file names of its pieces, the oldest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if fits := _PIECE.fullmatch(name):
            found.setdefault(fits[1], []).append((int(fits[2] or 0), name))
    return {log: [name for _, name in sorted(numbered)] for log, numbered in found.items()}


class RunFolder:
    """A run's record on the controller: ``<home>/runs/<run>``.

    run.json        the record: plan, who runs where, attempt
    plan.json       the frozen plan
    secrets/        0600: relay key, certificate and tokens
    relay/          the relay's data, when it runs here (its supervisor's folder is relay/node-0)
    tunnels/        one supervisor folder a tunnel
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "run.json"
        self.plan = root / "plan.json"
        self.secrets = root / "secrets"
        self.relay = root / "relay"
        self.tunnels = root / "tunnels"

    @classmethod
    def of(cls, run: str) -> RunFolder:
        """The folder of the run called ``run``."""
        return cls(home() / "runs" / run)


class CellFolder:
    """A cell's files on a site: ``<work_dir>/runs/<mark>/<cell>``. Paths are POSIX paths of the site.

    The mark is unique (``<run>.<16 digits>``): a run name used again, or by somebody else, never finds old files.

    cell.json       the CellJob
    token, ca.pem   0600: the cell's key to the relay, the relay's certificate
    secrets.json    0600: the variables of worker.secrets
    metrics.jsonl   one line a step, evaluation or exchange (written by rank 0)
    journal.jsonl   rounds that were resolved at another step than the planned one
    script/         the user's own script, where one trains
    outcome.json    how the workers ended, in their own words
    checkpoints/    step-00000100-attempt-1/ …
    node-0/         the supervisor's folder on node 0: job.json, state.json, exit.json, logs/
    node-0/logs/    rank-0.log … and node-0.log (what is printed outside of these); later pieces: rank-0.1.log …
    node-0/pulse-0.json …  the pulse of each rank; node-0/ranks.json: how torchrun found them dead
    """

    def __init__(self, root: PurePosixPath) -> None:
        self.root = root
        self.job = root / "cell.json"
        self.token = root / "token"
        self.ca = root / "ca.pem"
        self.secrets = root / "secrets.json"
        self.metrics = root / "metrics.jsonl"
        self.journal = root / "journal.jsonl"
        self.outcome = root / "outcome.json"
        self.checkpoints = root / "checkpoints"
        self.script = root / "script"

    def node(self, index: int) -> PurePosixPath:
        """The supervisor's folder on node ``index``."""
        return self.root / f"node-{index}"
