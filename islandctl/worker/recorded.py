"""torchrun, with a record of how its ranks ended: it tells the world only "exit code 1".

    python -m islandctl.worker.recorded torch.distributed.run OPTIONS…

The record is the file that ``ISLANDCTL_RANKS_ENDED`` names: ``ranks`` holds those that torchrun found dead together,
each with rank, pid, code or signal, and time; ``signal`` is the one that torchrun itself got from outside.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import suppress
from typing import Any

from islandctl.config.lines import keep_log

VARIABLE = "ISLANDCTL_RANKS_ENDED"


def main(argv: list[str]) -> int:
    """Run the module ``argv[0]`` with the rest as its arguments."""
    keep_log()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv = list(argv)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except ChildFailedError as error:
        ranks = [
            {
                "rank": rank,
                "pid": failure.pid,
                "code": failure.exitcode if failure.exitcode >= 0 else None,
                "signal": -failure.exitcode if failure.exitcode < 0 else None,
                "at": failure.timestamp,
            }
            for rank, failure in error.failures.items()
        ]
        write({"ranks": ranks, "signal": None})
        sys.stderr.write(f"{error}\n")
        return 1
    except SignalException as error:
        write({"ranks": [], "signal": int(error.sigval)})
        sys.stderr.write(f"torchrun: {error}\n")
        return 1
    return 0


def write(record: dict[str, Any]) -> None:
    """Whole or not at all; a full disk costs the record only."""
    path = os.environ.get(VARIABLE)
    if path:
        with suppress(OSError):
            with open(f"{path}.tmp", "w") as file:
                json.dump(record, file)
            os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
