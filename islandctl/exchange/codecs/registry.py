"""From a recipe's words, or a payload's numbers, to a codec."""

from __future__ import annotations

from islandctl.config.codec import FACTS, CodecName, Rounding, block_trouble, rounding_trouble
from islandctl.errors import ConfigError
from islandctl.exchange.codecs.base import Codec
from islandctl.exchange.codecs.grid import Grid
from islandctl.exchange.codecs.plain import Bf16, Fp32
from islandctl.exchange.codecs.two_bit import TwoBit

NUMBERS: dict[int, CodecName] = {1: "fp32", 2: "bf16", 3: "int8", 4: "int4", 5: "2bit"}


def codec_named(name: str, *, block: int | None = None, rounding: Rounding | None = None) -> Codec:
    """The codec of that name.

    Args:
        name: as in the recipe.
        block: values per scale; None: the codec's usual number.
        rounding: None: the codec's usual way.

    Raises:
        ConfigError: there is none, or it cannot do that: int4 with stochastic rounding and a block over 392, say.
    """
    known = next((known for known in FACTS if known == name), None)
    if known is None:
        raise ConfigError(f"exchange.codec: unknown codec '{name}'", hint=f"one of: {', '.join(FACTS)}")
    facts = FACTS[known]
    how = rounding or facts.rounding
    if trouble := rounding_trouble(known, how):
        raise ConfigError(f"exchange.rounding: {trouble}")
    if block is not None and (trouble := block_trouble(known, how, block)):
        raise ConfigError(f"exchange.block: {trouble}")
    return _make(known, block or facts.block, how == "stochastic")


def codec_numbered(number: int, block: int) -> Codec:
    """The codec that reads a payload of that codec number and block length. Raises ``ValueError``."""
    name = NUMBERS.get(number)
    if name is None:
        raise ValueError(f"unknown codec number {number}")
    # How a payload was rounded does not matter to its reader.
    if (FACTS[name].block or block) and (trouble := block_trouble(name, "nearest", block)):
        raise ValueError(trouble)
    return _make(name, block, False)


def _make(name: CodecName, block: int, stochastic: bool) -> Codec:
    match name:
        case "fp32":
            return Fp32()
        case "bf16":
            return Bf16()
        case "int8":
            return Grid(name, 3, FACTS[name].levels, block, stochastic)
        case "int4":
            return Grid(name, 4, FACTS[name].levels, block, stochastic)
        case "2bit":
            return TwoBit(block)
