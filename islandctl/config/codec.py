"""What each codec is, in numbers: how many bits a value takes, and which blocks error feedback can bear.

Without torch, since a plan needs it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CodecName = Literal["fp32", "bf16", "int8", "int4", "2bit"]
Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True)
class CodecFacts:
    """One codec."""

    bits: int
    """Of one value, without its share of the scale."""
    levels: int = 0
    """L: values lie on the grid −L…L times the block's scale. 0: no grid."""
    block: int = 0
    """Values per bf16 scale, when the recipe names no other number. 0: no scales."""
    rounding: Rounding = "nearest"
    """When the recipe names none."""
    feedback: float = 1.0
    """β, the share of the residual that goes with the next packet, when the recipe names none."""


FACTS: dict[CodecName, CodecFacts] = {
    "fp32": CodecFacts(bits=32),
    "bf16": CodecFacts(bits=16),
    "int8": CodecFacts(bits=8, levels=127, block=256, rounding="stochastic"),
    "int4": CodecFacts(bits=4, levels=7, block=128, rounding="stochastic"),
    "2bit": CodecFacts(bits=2, levels=1, block=64, feedback=0.95),
}


def contraction(block: int, levels: int) -> float:
    """ρ, the bound on the relative squared error of stochastic rounding; error feedback contracts when ρ < 1."""
    return (math.sqrt(1 + (block - 1) / levels**2) - 1) / 2


def rounding_trouble(codec: CodecName, rounding: Rounding) -> str | None:
    """Why the codec cannot round so; None: it can."""
    if rounding == "nearest" or FACTS[codec].levels > 1:
        return None
    if FACTS[codec].levels == 0:
        return f"{codec} has no grid to round to stochastically; it rounds to nearest"
    return f"{codec} rounds to nearest only: with L = 1 stochastic rounding takes blocks of at most 8 values"


def block_trouble(codec: CodecName, rounding: Rounding, block: int) -> str | None:
    """Why the codec cannot take so many values per scale; None: it can."""
    levels = FACTS[codec].levels
    if levels == 0:
        return f"{codec} has no scales, so no blocks"
    if not 4 <= block <= 65_535:
        return f"a block of {block} values: it must be 4 to 65,535"
    if rounding == "stochastic" and block - 1 >= 8 * levels**2:
        return (
            f"a block of {block} values is too long for {codec} with stochastic rounding: error feedback only "
            f"contracts when n - 1 < 8 L² (L = {levels}), so at most {8 * levels**2}"
        )
    return None


def body_bytes(codec: CodecName, block: int, count: int) -> int:
    """Bytes of ``count`` values in one payload: the scales of all started blocks, and the packed values."""
    scales = 2 * -(-count // block) if block else 0
    return scales + -(-count * FACTS[codec].bits // 8)
