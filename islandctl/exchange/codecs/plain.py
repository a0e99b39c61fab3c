"""Codecs that write every value by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from islandctl.config.codec import CodecName
from islandctl.exchange.codecs.base import TILE, BadValueError, Floats, Octets, Writer, widen
from islandctl.exchange.codecs.bits import Key


@dataclass(frozen=True)
class Fp32:
    """The values themselves: 32 bits each."""

    name: CodecName = "fp32"
    number: int = 1
    block: int = 0
    tile: int = TILE

    def writer(self, count: int, body: Octets, key: Key) -> Writer:
        places = body.view("<f4")

        def write(start: int, values: Floats) -> None:
            _check(values)
            places[start : start + len(values)] = values

        return write

    def read(self, body: Octets, out: Floats) -> None:
        out[:] = body.view("<f4")
        _check(out)


@dataclass(frozen=True)
class Bf16:
    """The upper 16 bits, rounded to nearest even; values beyond bf16's range go to its largest finite value."""

    name: CodecName = "bf16"
    number: int = 2
    block: int = 0
    tile: int = TILE

    def writer(self, count: int, body: Octets, key: Key) -> Writer:
        places = body.view("<i2")
        largest = torch.finfo(torch.bfloat16).max

        def write(start: int, values: Floats) -> None:
            _check(values)
            halves = torch.from_numpy(values).clamp(-largest, largest).to(torch.bfloat16)
            places[start : start + len(values)] = halves.view(torch.int16).numpy()

        return write

    def read(self, body: Octets, out: Floats) -> None:
        halves = body.view("<u2")
        for start in range(0, len(out), TILE):
            out[start : start + TILE] = widen(halves[start : start + TILE])
        _check(out)


def _check(values: Floats) -> None:
    if not np.isfinite(values).all():
        raise BadValueError("a value is not finite")
