"""What all codecs have in common."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from islandctl.config.codec import CodecName
from islandctl.exchange.codecs.bits import Key

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]

TILE = 131_072
"""Values that are worked on at a time: few enough that they and their scratch stay in a processor's cache."""


class BadValueError(ValueError):
    """A value is NaN or infinite."""


class Writer(Protocol):
    """Writes one payload's values into its body, tile by tile."""

    def __call__(self, start: int, values: Floats) -> None:
        """Write ``values``, the payload's values from ``start`` on.

        Tiles come in order and whole; only the last may be shorter. Raises ``BadValueError``.
        """


class Codec(Protocol):
    """One way to write fp32 values."""

    @property
    def name(self) -> CodecName:
        """As in the recipe."""

    @property
    def number(self) -> int:
        """As in the payload's header."""

    @property
    def block(self) -> int:
        """Values per scale; 0: no scales."""

    @property
    def tile(self) -> int:
        """Values that a writer takes at a time."""

    def writer(self, count: int, body: Octets, key: Key) -> Writer:
        """Of a payload of ``count`` values, into ``body``, which is all zeros and ``body_bytes`` long."""

    def read(self, body: Octets, out: Floats) -> None:
        """Fill ``out`` from a body of the right length. Raises ``BadValueError``."""


def widen(halves: npt.NDArray[np.generic]) -> Floats:
    """bf16 bits to fp32."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def whole_blocks(block: int, packed: int) -> int:
    """The tile of a codec: as many blocks as ``TILE`` holds, and whole bytes of ``packed`` values."""
    return max(packed, TILE // block // packed * packed) * block
