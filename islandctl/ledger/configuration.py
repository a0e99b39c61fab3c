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


def differences(then: Any, now: Any, key: str = "exchange") -> list[str]:
    """What differs between two of ``exchange_parts``, key by key: ``exchange.window: 50 then, 20 now``."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [text for name in (now | then) for text in differences(then.get(name), now.get(name), f"{key}.{name}")]
    return [] if then == now else [f"{key}: {_word(then)} then, {_word(now)} now"]


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)
