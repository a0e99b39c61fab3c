"""Who exchanges with whom in a butterfly: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from islandctl.errors import ConfigError


@dataclass(frozen=True)
class Pairing:
    """N = 2^k cells; in window w fragment p pairs cell i with i XOR 2^((w+p) mod k).

    Any k windows in a row pair a cell by every bit of its number, once each: then its value has reached all others.
    Only powers of two can come to an exact mean in finitely many such rounds (arXiv 1206.0992).

    Raises:
        ConfigError: the number of cells is no power of two from 2 on.
    """

    num_cells: int

    def __post_init__(self) -> None:
        if self.num_cells < 2 or self.num_cells & (self.num_cells - 1):
            near = " or ".join(str(one) for one in nearest_powers(self.num_cells))
            raise ConfigError(f"a butterfly pairs 2, 4, 8, … cells, not {self.num_cells}; nearest: {near}")

    @property
    def num_bits(self) -> int:
        """k."""
        return self.num_cells.bit_length() - 1

    def bit(self, fragment: int, window: int) -> int:
        """The bit in which partners' numbers differ."""
        return (window + fragment) % self.num_bits

    def partner(self, cell: int, fragment: int, window: int) -> int:
        """The cell's partner in that round."""
        return cell ^ (1 << self.bit(fragment, window))

    def pair(self, cell: int, fragment: int, window: int) -> tuple[int, int]:
        """The cell and its partner, the lower number first."""
        other = self.partner(cell, fragment, window)
        return min(cell, other), max(cell, other)


def nearest_powers(num_cells: int) -> list[int]:
    """The powers of two, from 2 on, next below and next above a number that is none."""
    if num_cells < 2:
        return [2]
    lower = 1 << (num_cells.bit_length() - 1)
    return [lower, 2 * lower]
