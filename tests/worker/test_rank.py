"""Which rank a process is."""

import socket

from islandctl.worker.rank import TORCHRUN, own_rank


def test_an_only_rank_believes_nobody_but_torchrun() -> None:
    strange = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    environ = dict(strange)
    assert own_rank(environ) == 0
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("0", "0", "1")
    with socket.create_server((environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))):
        pass
    ranks = strange | {TORCHRUN: "none"}
    environ = dict(ranks)
    assert own_rank(environ) == 3
    assert environ == ranks
