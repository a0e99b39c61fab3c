"""islandctl trains one model over several GPU clusters that stand far apart.

For a training loop of one's own: ``attach``, ``run_cells``, ``Exchange``, ``InProcessRelay``; see docs/attach.md.
They are imported when they are first used, so that commands without a model need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from islandctl.config.exchange import Exchange as Exchange
    from islandctl.exchange.journal import MemoryJournal as MemoryJournal
    from islandctl.relay.cells import run_cells as run_cells
    from islandctl.relay.inprocess import InProcessRelay as InProcessRelay
    from islandctl.worker.attach import attach as attach
    from islandctl.worker.island import Island as Island

__version__ = "0.1.0"

_PLACES = {
    "attach": "islandctl.worker.attach",
    "Exchange": "islandctl.config.given",
    "InProcessRelay": "islandctl.relay.inprocess",
    "MemoryJournal": "islandctl.exchange.journal",
    "Island": "islandctl.worker.island",
    "run_cells": "islandctl.relay.cells",
}
__all__ = ["Exchange", "InProcessRelay", "Island", "MemoryJournal", "attach", "run_cells"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'islandctl' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
