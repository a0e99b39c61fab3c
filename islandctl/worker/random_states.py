"""The random states of a process: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from islandctl.worker.objects import put_together, split


def seed_all(seed: int) -> None:
    """Begin all of them anew, so that two runs of one recipe draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """All of them, as tensors of bytes."""
    states = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng/cuda"] = torch.cuda.get_rng_state(device)
    states |= split(random.getstate(), "rng/python")
    return states | split(np.random.get_state(legacy=False), "rng/numpy")


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set what ``random_states`` gave."""
    torch.set_rng_state(states["rng/cpu"])
    if "rng/cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["rng/cuda"], device)
    random.setstate(put_together(states, "rng/python"))
    np.random.set_state(put_together(states, "rng/numpy"))
