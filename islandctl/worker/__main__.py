"""One rank, alone or under torchrun, from cell.json to outcome.json.

``python -m islandctl.worker CELL_FOLDER``            the built-in training loop
``python -m islandctl.worker CELL_FOLDER train.py …`` a script of the user's own (or ``-m module …``)
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NoReturn

from pydantic import ValidationError

from islandctl.config import secrets
from islandctl.config.job import CellJob
from islandctl.config.lines import Pieces, WholeLines, kept_bytes
from islandctl.config.paths import CellFolder
from islandctl.errors import ConfigError, IslandError, UsageError
from islandctl.worker import interface
from islandctl.worker.main import train
from islandctl.worker.outcome import Outcome, release_outcome, reserve_outcome, write_outcome
from islandctl.worker.process import Process, enter
from islandctl.worker.pulse import Pulse
from islandctl.worker.random_states import seed_all
from islandctl.worker.rank import own_rank
from islandctl.worker.script import run_script
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
            Pieces(Path(node, "logs"), f"rank-{rank}", kept_bytes=kept_bytes()).begin()
    logging.raiseExceptions = False  # else each lost line would print a traceback, to the same full disk
    handler = WholeLines(2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def main(argv: list[str]) -> int:
    """Run one rank of the cell in the folder ``argv[0]``. Returns the exit code: 0 for finished and stopped."""
    if not argv:
        sys.stderr.write("usage: python -m islandctl.worker CELL_FOLDER [SCRIPT …]\n")
        return 2
    rank = own_rank(os.environ)
    start_log(rank)
    interface.choose(os.environ)
    folder = CellFolder(PurePosixPath(os.path.abspath(argv[0])))
    if rank == 0:
        Path(folder.outcome).unlink(missing_ok=True)
    reserve_outcome(Path(folder.outcome), rank)
    node = os.environ.get(NODE_VARIABLE)
    wishes = Wishes(Path(folder.root), Path(node) if node else None)
    wishes.listen()

    process: Process | None = None
    code = 0
    try:
        job = read_job(folder)
        secrets.know(job.recipe.worker.secrets)
        process = enter(Process(folder, job, wishes, Pulse(Path(node) if node else None, rank)))
        outcome = work(process, argv[1:])
    except Stopped as error:
        outcome = Outcome.ended("stopped", str(error), step=process.step if process else 0, retry=True)
    except Exception as error:
        if not isinstance(error, IslandError):
            log.exception("rank %d ends unexpectedly", rank)
        outcome = Outcome.of(error, step=process.step if process else 0, rank=rank)
        if outcome.retry and process and process.session and process.session.halted():
            outcome = outcome.model_copy(update={"retry": False})
        code = error.exit_code if isinstance(error, IslandError) else 1
    if rank == 0 or code:
        write_outcome(Path(folder.outcome), outcome)
    else:
        release_outcome(Path(folder.outcome), rank)
    log.log(logging.ERROR if code else logging.INFO, "%s: %s", outcome.outcome, outcome.reason)
    if outcome.hint:
        log.info("hint: %s", outcome.hint)
    if process is not None and process.session is not None:
        process.session.leave(outcome)
    return code


def work(process: Process, script: list[str]) -> Outcome:
    """Train, with the built-in loop or the script; the outcome of an end without an error.

    Raises:
        UsageError: the script has not attached, or not finished.
    """
    seed_all(process.job.recipe.training.seed)
    if not script:
        train(process)
    else:
        run_script(script)
    session, name = process.session, " ".join(script[:2] if script[:1] == ["-m"] else script[:1])
    if session is None:
        raise UsageError(f"{name} ended without islandctl.attach()", hint="see docs/attach.md")
    if not session.ended:
        raise UsageError(
            f"{name} ended at step {session.done} of {session.num_steps} without island.finish()",
            hint="call it behind the loop; it exchanges once more and saves",
        )
    return session.outcome()


def leave(code: int) -> NoReturn:
    """End the process as Python does, but without taking the interpreter apart.

    Threads of torch and gloo that outlive their groups come back for the interpreter's lock there, are ended in the
    middle of a C++ function, and the process dies of SIGABRT ("terminate called without an active exception") after
    everything is done. What a script has left to its own threads and to ``atexit`` is done first.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's children do
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
