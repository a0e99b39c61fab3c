"""int8 and int4: each block of values on its own even grid, rounded stochastically or to nearest.

s = max|x|/L in bf16, rounded up, so that nothing is clipped; q = ⌊x/s + u⌋ with u uniform in [0, 1) (nearest: u = ½).
Stochastic rounding is unbiased; its error is E‖C(x)−x‖² ≤ ρ‖x‖² with ρ = (√(1 + (n−1)/L²) − 1)/2 for blocks of n.

The arithmetic works in fixed point: x/s plus an offset is a float of known exponent, whose bits are an integer part
over a fraction of 15 or 16 bits. Random bits added to the fraction carry into the integer part exactly as often as
the fraction says, and never when it is zero: values on the grid stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from islandctl.config.codec import CodecName
from islandctl.exchange.codecs.base import BadValueError, Floats, Octets, Writer, whole_blocks, widen
from islandctl.exchange.codecs.bits import Bits, Key

LARGEST = np.float32(2.0**127)
"""Values beyond go to ±LARGEST, lest a scale that is rounded up leads out of fp32's range."""
SMALLEST = np.float32(2.0**-133)
"""The smallest scale but 0. Divided by it, the zeros of a zero block are zeros."""


@dataclass(frozen=True)
class Grid:
    """Codes q + L + 1, one or two a byte."""

    name: CodecName
    number: int
    levels: int
    block: int
    stochastic: bool

    @property
    def packed(self) -> int:
        """Values per byte."""
        return 1 if self.levels > 7 else 2

    @property
    def tile(self) -> int:
        return whole_blocks(self.block, self.packed)

    def writer(self, count: int, body: Octets, key: Key) -> Writer:
        return _GridWriter(self, count, body, key)

    def read(self, body: Octets, out: Floats) -> None:
        num_blocks = -(-len(out) // self.block)
        scales = widen(body[: 2 * num_blocks].view("<u2"))
        if not np.isfinite(scales * np.float32(self.levels)).all():
            raise BadValueError("a scale is not finite")
        codes = body[2 * num_blocks :]
        middle = np.float32(self.levels + 1)
        room = np.empty(min(self.tile, len(out)), dtype=np.float32)
        for start in range(0, len(out), self.tile):
            part = out[start : start + self.tile]
            packed = codes[start // self.packed : -(-(start + len(part)) // self.packed)]
            q = room[: len(part)]
            q[:] = (packed if self.packed == 1 else _nibbles(packed))[: len(part)]
            q -= middle
            blocks = scales[start // self.block : -(-(start + len(part)) // self.block)]
            _by_block(q, blocks, self.block, part)


class _GridWriter:
    """The state of writing one payload: where it goes, and scratch for one tile."""

    def __init__(self, grid: Grid, count: int, body: Octets, key: Key) -> None:
        num_blocks = -(-count // grid.block)
        self._grid = grid
        self._scales = body[: 2 * num_blocks].view("<u2")
        self._codes = body[2 * num_blocks :]
        self._levels = np.float32(grid.levels)
        self._fraction = 15 if grid.packed == 1 else 16
        self._offset = np.float32(2 ** (23 - self._fraction) + grid.levels + 1)
        self._room = _Room(min(grid.tile, num_blocks * grid.block), grid.block)
        self._bits = Bits(key, len(self._room.work)) if grid.stochastic else None

    def __call__(self, start: int, values: Floats) -> None:
        grid, count = self._grid, len(values)
        if rest := -count % grid.block:
            values = np.pad(values, (0, rest))
        if len(values) != len(self._room.work):  # the last tile
            self._room = _Room(len(values), grid.block)
        room = self._room
        scale_B1, values = self._scale(start // grid.block, values)
        torch.div(torch.from_numpy(values).view(-1, grid.block), scale_B1, out=room.work_BN)
        np.add(room.work, self._offset, out=room.work)
        fixed, other = room.fixed, room.other
        if self._bits is None:
            np.add(fixed, np.int32(1 << (self._fraction - 1)), out=fixed)
        else:
            np.copyto(other, self._bits.next(len(other)))
            if self._fraction < 16:
                np.right_shift(other, np.int32(16 - self._fraction), out=other)
            np.add(fixed, other, out=fixed)
        np.right_shift(fixed, np.int32(self._fraction), out=fixed)
        np.copyto(room.codes, fixed, casting="unsafe")  # the lowest byte; above it lie the float's exponent and sign
        self._pack(start, count)

    def _scale(self, first: int, values: Floats) -> tuple[torch.Tensor, Floats]:
        """Write the blocks' scales, and give them with 0 replaced; also the values, within the codec's range."""
        room = self._room
        np.abs(values, out=room.work)
        largest_B: Floats = torch.amax(room.work_BN, dim=1).numpy()
        if not largest_B.max() <= LARGEST:
            if not np.isfinite(largest_B).all():
                raise BadValueError("a value is not finite")
            values = np.clip(values, -LARGEST, LARGEST)
            np.minimum(largest_B, LARGEST, out=largest_B)
        scale_B = largest_B / self._levels
        bits_B = scale_B.view(np.uint32)
        bits_B += np.uint32(0xFFFF)
        bits_B &= np.uint32(0xFFFF0000)
        # The quotient itself may have been rounded down: only then the scale still falls short.
        short_B = scale_B * self._levels < largest_B
        if short_B.any():
            bits_B[short_B] += np.uint32(0x10000)
        self._scales[first : first + len(bits_B)] = bits_B >> np.uint32(16)
        np.maximum(scale_B, SMALLEST, out=scale_B)
        return torch.from_numpy(scale_B)[:, None], values

    def _pack(self, start: int, count: int) -> None:
        octets, packed = self._room.octets, self._grid.packed
        place = self._codes[start // packed : -(-(start + count) // packed)]
        if packed == 1:
            place[:] = octets[:count]
            return
        octets[count:] = 0
        pairs = octets[: count + count % 2].view("<u2")
        pairs |= pairs >> np.uint16(4)
        np.copyto(place, pairs, casting="unsafe")


class _Room:
    """Scratch for one tile, under all the names by which it is used."""

    def __init__(self, count: int, block: int) -> None:
        self.work = np.empty(count, dtype=np.float32)
        self.work_BN = torch.from_numpy(self.work).view(-1, block)
        self.fixed = self.work.view(np.int32)
        self.other = np.empty(count, dtype=np.int32)
        self.octets = np.empty(count + count % 2, dtype=np.uint8)  # whole pairs
        self.codes = self.octets[:count]


def _nibbles(packed: Octets) -> Octets:
    """Two codes a byte to one a byte, low half first."""
    pairs = packed.astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


def _by_block(values: Floats, scales: Floats, block: int, out: Floats) -> None:
    """out = values · the scale of each value's block; the last block may be cut short."""
    whole = len(values) // block * block
    torch.mul(
        torch.from_numpy(values[:whole]).view(-1, block),
        torch.from_numpy(scales[: whole // block])[:, None],
        out=torch.from_numpy(out[:whole]).view(-1, block),
    )
    if whole < len(values):
        np.multiply(values[whole:], scales[-1], out=out[whole:])
