"""What the doctor asks of the workers' interpreter."""

from __future__ import annotations

import torch

from islandctl.fleet.checks.load import judge_matrix
from islandctl.fleet.checks.software import judge_software
from islandctl.worker import examined


def test_versions_and_the_matrix_rate() -> None:
    told = examined.versions({})
    assert told["torch"] == torch.__version__
    assert judge_software(told, driver="", gpus=False).level == "ok"
    threads = torch.get_num_threads()
    try:
        asked = {"device": "cpu", "precision": "float32", "size": 64, "seconds": 0.05, "threads": 1, "queries": []}
        rates = examined.matrix(asked)
    finally:
        torch.set_num_threads(threads)
    assert rates["devices"] == 1
    verdict = judge_matrix(rates, best=None, kind="cpu")
    assert (verdict.level, verdict.unit) == ("ok", "FLOP/s")
    assert verdict.measured["gpu.bf16"] > 1e6
