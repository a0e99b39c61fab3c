"""What stands for the configuration where there is no recipe."""

from __future__ import annotations

from islandctl.config.exchange import Exchange
from islandctl.ledger.packet import canonical_json, digest


def exchange_hash(exchange: Exchange, num_cells: int) -> str:
    """The configuration hash of cells that only agree on how they exchange; packets of another one are refused."""
    return digest(canonical_json({"exchange": exchange.model_dump(mode="json"), "cells": num_cells}))
