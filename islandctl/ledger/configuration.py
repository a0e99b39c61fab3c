"""What stands for the configuration in hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from islandctl.config.exchange import Exchange
from islandctl.ledger.packet import canonical_json, digest


def exchange_parts(exchange: Exchange) -> dict[str, Any]:
    """What a hash covers of it. What cells of equal pace are not asked is left out: their packets are as they were
    before there was any other."""
    parts = exchange.model_dump(mode="json")
    if exchange.pace == "equal":
        del parts["pace"], parts["pace_bound"]
    return parts


def paces(windows: Sequence[int | None]) -> dict[str, Any]:
    """The same of the cells' own steps a window; nothing where they have none."""
    return {} if all(one is None for one in windows) else {"windows": list(windows)}


def exchange_hash(exchange: Exchange, num_cells: int, windows: Sequence[int] = ()) -> str:
    """The configuration hash of cells that only agree on how they exchange; packets of another one are refused.

    Args:
        windows: each cell's own steps in a window, with ``pace: measured``.
    """
    return digest(canonical_json({"exchange": exchange_parts(exchange), "cells": num_cells, **paces(windows)}))
