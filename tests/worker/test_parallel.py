"""Ranks and the devices they take."""

from __future__ import annotations

import pytest
import torch

from islandctl.errors import ConfigError, PreflightError
from islandctl.worker.parallel import Ranks


def test_a_gpu_that_has_fallen_off_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "7"), ("LOCAL_RANK", "7"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(PreflightError, match="rank 7 should use GPU 7, but this node shows 7") as caught:
            Ranks.start(8)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert "gpu.per_node" in caught.value.hint


def test_another_number_of_ranks_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="8 ranks by its plan, but 2 were started"):
        Ranks.start(8)
