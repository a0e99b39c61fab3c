"""Secrets are named in recipe and profiles; their values come from the environment, and are written nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterable

LEAST_LETTERS = 6
"""A shorter value is no secret, and would be found in every other word."""
_known: set[str] = set()


def values(names: Iterable[str]) -> dict[str, str]:
    """Those of these variables that are set here."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def know(names: Iterable[str]) -> None:
    """From now on :func:`hide` knows the values of these variables."""
    _known.update(value for value in values(names).values() if len(value) >= LEAST_LETTERS)


def hide(text: str) -> str:
    """``text`` with three stars in the place of every secret that is known."""
    for value in _known:
        text = text.replace(value, "***")
    return text
