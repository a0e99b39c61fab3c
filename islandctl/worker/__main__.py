"""``python -m islandctl.worker CELL_FOLDER``: one rank, alone or under torchrun. From cell.json to outcome.json."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.errors import ConfigError, IslandError
from islandctl.worker.main import Worker
from islandctl.worker.outcome import Outcome, release_outcome, reserve_outcome, write_outcome
from islandctl.worker.wishes import Stopped, Wishes

log = logging.getLogger("islandctl.worker")
NODE_VARIABLE = "ISLANDCTL_NODE_FOLDER"


def read_job(folder: CellFolder) -> CellJob:
    """``cell.json``.

    Raises:
        ConfigError: missing, or not a cell's job.
    """
    try:
        return CellJob.model_validate_json(Path(folder.job).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {folder.job}: {error.strerror}", hint="run islandctl launch") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{folder.job}: {place}: {first['msg']}",
            hint="this file is written by islandctl launch; the versions of controller and site may differ",
        ) from error


def start_log(rank: int) -> None:
    """Log to stderr; under a supervisor stdout and stderr become ``logs/rank-N.log``. A full disk loses lines."""
    node = os.environ.get(NODE_VARIABLE)
    if node:
        with suppress(OSError):
            logs = Path(node, "logs")
            logs.mkdir(parents=True, exist_ok=True)
            file = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (1, 2):
                os.dup2(file, stream)
            os.close(file)
    logging.raiseExceptions = False  # else each lost line would print a traceback, to the same full disk
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def main(argv: list[str]) -> int:
    """Run one rank of the cell in the folder ``argv[0]``. Returns the exit code: 0 for finished and stopped."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m islandctl.worker CELL_FOLDER\n")
        return 2
    rank = int(os.environ.get("RANK", "0"))
    start_log(rank)
    folder = CellFolder(PurePosixPath(os.path.abspath(argv[0])))
    if rank == 0:
        Path(folder.outcome).unlink(missing_ok=True)
    reserve_outcome(Path(folder.outcome), rank)
    node = os.environ.get(NODE_VARIABLE)
    wishes = Wishes(Path(folder.root), Path(node) if node else None)
    wishes.listen()

    worker: Worker | None = None
    code = 0
    try:
        worker = Worker(folder, read_job(folder), wishes)
        outcome = worker.run()
    except Stopped as error:
        outcome = Outcome.ended("stopped", str(error), step=worker.step if worker else 0, retry=True)
    except Exception as error:
        if not isinstance(error, IslandError):
            log.exception("rank %d ends unexpectedly", rank)
        outcome = Outcome.of(error, step=worker.step if worker else 0, rank=rank)
        if outcome.retry and worker and worker.halted():
            outcome = outcome.model_copy(update={"retry": False})
        code = error.exit_code if isinstance(error, IslandError) else 1
    if rank == 0 or code:
        write_outcome(Path(folder.outcome), outcome)
    else:
        release_outcome(Path(folder.outcome), rank)
    log.log(logging.ERROR if code else logging.INFO, "%s: %s", outcome.outcome, outcome.reason)
    if outcome.hint:
        log.info("hint: %s", outcome.hint)
    if worker is not None:
        worker.close(outcome)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
