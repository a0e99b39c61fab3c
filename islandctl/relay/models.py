"""Whether all cells hold the same model: names and shapes of the parameters, told once by each before it trains."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.model import Model


class Outline(Model):
    """One cell's model."""

    attempt: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape) of every parameter, sorted by name."""


def outline(attempt: int, parameters: Sequence[tuple[str, Sequence[int]]]) -> Outline:
    """The outline of these (name, shape) pairs, given in any order."""
    return Outline(attempt=attempt, parameters=tuple(sorted((name, tuple(shape)) for name, shape in parameters)))


def difference(one: Outline, other: Outline, names: tuple[str, str]) -> str:
    """The first parameter, in order of the names, that is not the same in both; empty: all are.

    Args:
        names: of the two cells, for the text.
    """
    first, second = dict(one.parameters), dict(other.parameters)
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            told = [
                f"{cell} has no such parameter" if shape is None else f"its shape is {shape} in {cell}"
                for cell, shape in ((names[0], first.get(name)), (names[1], second.get(name)))
            ]
            return f"parameter '{name}': {told[0]}, {told[1]}"
    return ""
