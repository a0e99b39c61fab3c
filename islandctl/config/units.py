"""Quantities with compulsory units: text in, plain SI numbers out.

Every type here is a pydantic annotation. A value is written with its unit (``25 Gbit/s``, ``10 min``) and is
held as one number in the base unit that the type's name says. Bare numbers are refused, except where zero or a
share is meant. Prefixes are decimal (k, M, G, T, P); memory may also be binary (Ki, Mi, Gi, Ti).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _split(value: Any, examples: str) -> tuple[float, str]:
    """Split ``25 Gbit/s`` into 25.0 and ``Gbit/s``."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"expected a quantity with its unit, for example {examples}")
    text = str(value).strip()
    match = re.fullmatch(_NUMBER + r"\s*(.*)", text)
    if match is None:
        raise ValueError(f"'{text}' is not a quantity; write for example {examples}")
    if not match[2]:
        raise ValueError(f"'{text}' has no unit; write for example {examples}")
    return float(match[1]), match[2]


def _positive(number: float, text: Any) -> float:
    if number < 0:
        raise ValueError(f"'{text}' is negative")
    return number


def parse_bits_per_s(value: Any) -> float:
    """``25 Gbit/s`` or ``3.1 GB/s`` to bits per second. ``Gbps`` and ``GBPS`` are ambiguous and refused."""
    examples = "25 Gbit/s or 3 GB/s"
    number, unit = _split(value, examples)
    match = re.fullmatch(r"([kKMGTP]?)(bit|B)/s", unit)
    if match is None:
        raise ValueError(f"unit '{unit}' is unknown or ambiguous; write for example {examples}")
    return _positive(number * _DECIMAL[match[1]] * (8 if match[2] == "B" else 1), value)


def parse_bytes(value: Any) -> int:
    """``288 GB`` (decimal) or ``512 GiB`` (binary) to bytes."""
    examples = "288 GB or 512 GiB"
    number, unit = _split(value, examples)
    match = re.fullmatch(r"([kKMGTP]?i?)B", unit)
    prefix = None if match is None else _DECIMAL.get(match[1], _BINARY.get(match[1]))
    if prefix is None:
        raise ValueError(f"unit '{unit}' is unknown or ambiguous; write for example {examples}")
    return round(_positive(number * prefix, value))


def parse_bytes_per_s(value: Any) -> float:
    """``5 GB/s`` (or ``40 Gbit/s``) to bytes per second."""
    return parse_bits_per_s(value) / 8


def parse_seconds(value: Any) -> float:
    """``140 ms``, ``30 s``, ``10 min``, ``2 h``, ``7 d`` to seconds."""
    examples = "140 ms, 30 s, 10 min or 2 h"
    number, unit = _split(value, examples)
    if unit not in _TIME:
        raise ValueError(f"unit '{unit}' is unknown; write for example {examples}")
    return _positive(number * _TIME[unit], value)


def parse_usd_per_hour(value: Any) -> float:
    """``3.50 USD/h`` to US dollars per hour."""
    number, unit = _split(value, "3.50 USD/h")
    if unit != "USD/h":
        raise ValueError(f"unit '{unit}' is unknown; write for example 3.50 USD/h")
    return _positive(number, value)


def parse_usd_per_gb(value: Any) -> float:
    """``0.05 USD/GB`` to US dollars per 10⁹ bytes."""
    number, unit = _split(value, "0.05 USD/GB")
    if unit != "USD/GB":
        raise ValueError(f"unit '{unit}' is unknown; write for example 0.05 USD/GB")
    return _positive(number, value)


def parse_flops(value: Any) -> float:
    """``2250 TFLOP/s`` to floating-point operations per second."""
    number, unit = _split(value, "989 TFLOP/s")
    match = re.fullmatch(r"([kKMGTP]?)FLOP/s", unit)
    if match is None:
        raise ValueError(f"unit '{unit}' is unknown; write for example 989 TFLOP/s")
    return _positive(number * _DECIMAL[match[1]], value)


def parse_share(value: Any) -> float:
    """``5 %`` or ``0.05`` to a share between 0 and 1."""
    text = str(value).strip()
    match = re.fullmatch(_NUMBER + r"\s*(%?)", text)
    if match is None or isinstance(value, bool):
        raise ValueError(f"'{text}' is not a share; write for example 5 % or 0.05")
    number = float(match[1]) / (100 if match[2] else 1)
    if not 0 <= number <= 1:
        raise ValueError(f"'{text}' is not between 0 and 1 (0 % and 100 %)")
    return number


def _written(unit: str) -> PlainSerializer:
    """Serialise as ``NUMBER UNIT``, so that a dumped model can be read again."""
    return PlainSerializer(lambda number: f"{number!r} {unit}", return_type=str)


def _typed(parse: Any) -> BeforeValidator:
    return BeforeValidator(parse, json_schema_input_type=str)


BitsPerSecond = Annotated[float, _typed(parse_bits_per_s), _written("bit/s")]
Bytes = Annotated[int, _typed(parse_bytes), _written("B")]
BytesPerSecond = Annotated[float, _typed(parse_bytes_per_s), _written("B/s")]
Seconds = Annotated[float, _typed(parse_seconds), _written("s")]
UsdPerHour = Annotated[float, _typed(parse_usd_per_hour), _written("USD/h")]
UsdPerGigabyte = Annotated[float, _typed(parse_usd_per_gb), _written("USD/GB")]
Flops = Annotated[float, _typed(parse_flops), _written("FLOP/s")]
Share = Annotated[float, BeforeValidator(parse_share, json_schema_input_type=float | str)]
