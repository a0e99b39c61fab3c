"""2bit: each block of values on the four levels −3s, −s, s, 3s, to nearest.

First the values beyond the block's root mean square go to the outer levels, as is best for a bell curve, and
s = ⟨|x|, c⟩/⟨c, c⟩ fits these codes c; then every value goes to its nearest level, and s fits the new codes. So the
error is at most ‖x‖²·(1 − cos²(|x|, c)), which is at most ρ = (n − 1)/(n + 8) of ‖x‖² for blocks of n ≥ 4 (reached
when all lies in one value), and 0.11 of it for a bell curve: error feedback contracts always. Levels laid out from
the largest value would not: with heavy tails their error exceeds the values themselves. Three levels −s, 0, s lose
0.19 of a bell curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from islandctl.config.codec import CodecName
from islandctl.exchange.codecs.base import BadValueError, Floats, Octets, Writer, whole_blocks, widen
from islandctl.exchange.codecs.bits import Key

LARGEST = np.float32(2.0**124)
"""Values beyond go to ±LARGEST, lest 3s leads out of fp32's range."""


@dataclass(frozen=True)
class TwoBit:
    """Codes 0, 1, 2, 3 for −3s, −s, s, 3s; four a byte."""

    block: int
    name: CodecName = "2bit"
    number: int = 5

    @property
    def tile(self) -> int:
        return whole_blocks(self.block, 4)

    def writer(self, count: int, body: Octets, key: Key) -> Writer:
        num_blocks = -(-count // self.block)
        scales, packed = body[: 2 * num_blocks].view("<u2"), body[2 * num_blocks :]

        def write(start: int, values: Floats) -> None:
            codes = np.empty(len(values), dtype=np.uint8)
            whole = len(values) // self.block * self.block
            for low, high, block in ((0, whole, self.block), (whole, len(values), len(values) - whole)):
                if low < high:  # a last, shorter block is fitted by itself
                    x_BN = values[low:high].reshape(-1, block)
                    codes_BN, scale_B = _fit(x_BN)
                    first = (start + low) // self.block
                    scales[first : first + len(scale_B)] = scale_B
                    codes[low:high] = codes_BN.reshape(-1)
            packed[start // 4 : -(-(start + len(values)) // 4)] = _pack(codes)

        return write

    def read(self, body: Octets, out: Floats) -> None:
        num_blocks = -(-len(out) // self.block)
        scales = widen(body[: 2 * num_blocks].view("<u2"))
        if not np.isfinite(scales * np.float32(3)).all():
            raise BadValueError("a scale is not finite")
        packed = body[2 * num_blocks :]
        for start in range(0, len(out), self.tile):
            part = out[start : start + self.tile]
            quads = packed[start // 4 : -(-(start + len(part)) // 4)].astype("<u4")
            quads = (quads | quads << np.uint32(12)) & np.uint32(0x000F000F)
            quads = (quads | quads << np.uint32(6)) & np.uint32(0x03030303)
            np.multiply(quads.view(np.uint8)[: len(part)], np.float32(2), out=part, casting="unsafe")
            part -= np.float32(3)
            of_value = np.repeat(scales[start // self.block : -(-(start + len(part)) // self.block)], self.block)
            part *= of_value[: len(part)]


def _fit(x_BN: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Codes and bf16 scales of whole blocks."""
    size_BN = np.abs(x_BN)
    largest_B = size_BN.max(axis=1)
    if not np.isfinite(largest_B).all():
        raise BadValueError("a value is not finite")
    np.minimum(size_BN, LARGEST, out=size_BN)
    np.minimum(largest_B, LARGEST, out=largest_B)
    size_BN /= np.where(largest_B == 0, np.float32(1), largest_B)[:, None]
    square_B = _sum(size_BN * size_BN) / np.float32(x_BN.shape[1])
    first_B = _best_scale(size_BN, size_BN > np.sqrt(square_B)[:, None])
    outer_BN = size_BN > (np.float32(2) * first_B)[:, None]
    # One level alone is always the inner one, whatever the values: so they are coded alike a second time.
    outer_BN[outer_BN.all(axis=1)] = False
    bits_B = (largest_B * _best_scale(size_BN, outer_BN)).view(np.uint32)
    # To nearest, ties to even.
    bits_B = (bits_B + np.uint32(0x7FFF) + (bits_B >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    outer_BN = outer_BN.view(np.uint8)
    codes_BN = np.where(x_BN < 0, np.uint8(1) - outer_BN, np.uint8(2) + outer_BN)
    return codes_BN, bits_B.astype("<u2")


def _best_scale(size_BN: Floats, outer_BN: npt.NDArray[np.bool_]) -> Floats:
    """s = ⟨|x|, c⟩/⟨c, c⟩ with c = 3 for the outer values and 1 for the others."""
    c_BN = outer_BN.astype(np.float32)
    c_BN *= np.float32(2)
    c_BN += np.float32(1)
    square_B = _sum(c_BN * c_BN)
    c_BN *= size_BN
    return _sum(c_BN) / square_B


def _sum(x_BN: Floats) -> Floats:
    """Σ over each block by halving, in the same order on every processor; ``x_BN`` is used up."""
    width = x_BN.shape[1]
    while width > 1:
        half = (width + 1) // 2
        x_BN[:, : width - half] += x_BN[:, half:width]
        width = half
    return x_BN[:, 0]


def _pack(codes: Octets) -> Octets:
    """Four codes a byte, the first in the lowest bits."""
    quads = np.pad(codes, (0, -len(codes) % 4)).view("<u4")
    quads |= quads >> np.uint32(6)
    quads |= quads >> np.uint32(12)
    return quads.astype(np.uint8)
