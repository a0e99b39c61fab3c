"""Which of its cell's ranks this process is, as torchrun says. An only rank starts without it, seconds sooner."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""torchrun gives this variable to its ranks, and nobody else does."""


def own_rank(environ: MutableMapping[str, str]) -> int:
    """This process's number in its cell.

    Where torchrun has not started it, it is the cell's only rank, whatever else the environment says; what torchrun
    would have said is put there, so that a script's ``init_process_group()`` finds it, with a port that is free.
    """
    if TORCHRUN not in environ:
        with socket.create_server(("", 0)) as tried:
            port = tried.getsockname()[1]
        environ.update(RANK="0", LOCAL_RANK="0", GROUP_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return int(environ["RANK"])
