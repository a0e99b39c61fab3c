"""Quantities with compulsory units: text in, plain SI numbers out.

Every type here is a pydantic annotation. A value is written with its unit (``25 Gbit/s``, ``10 min``) and is
held as one number in the base unit that the type's name says. Bare numbers are refused, except where a share is
meant. Prefixes are decimal (k, M, G, T, P); memory may also be binary (Ki, Mi, Gi, Ti, Pi). Rates, sizes and sums
of money are more than zero; times, prices and shares may be zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_TIME = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_LARGEST = Decimal("1e24")
"""In base units; beyond it a quantity is a slip of the hand."""
_AMBIGUOUS = re.compile(r"(?i)[kmgtp]?b(it)?ps|[kmgtp]i?b(it)?|[kmgtp]?b/s|[kmgtp]")


def _split(value: Any, examples: str) -> tuple[Decimal, str]:
    """Split ``25 Gbit/s`` into 25 and ``Gbit/s``."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"expected a quantity with its unit, for example {examples}")
    text = str(value).strip()
    match = re.fullmatch(_NUMBER + r"\s*([^\d\s].*)?", text, re.ASCII)
    if match is None:
        raise ValueError(f"'{text}' is not a quantity; write for example {examples}")
    if not match[2]:
        raise ValueError(f"'{text}' has no unit; write for example {examples}")
    return Decimal(match[1]), match[2]


def _bounded(number: Decimal, text: Any, *, zero: bool = False) -> Decimal:
    if number < 0:
        raise ValueError(f"'{text}' is negative")
    if number == 0 and not zero:
        raise ValueError(f"'{text}' is zero, which makes no sense here")
    if number > _LARGEST:
        raise ValueError(f"'{text}' is too large to be meant")
    return number


def _unknown(unit: str, examples: str) -> ValueError:
    kind = "ambiguous" if _AMBIGUOUS.fullmatch(unit) else "unknown here"
    return ValueError(f"unit '{unit}' is {kind}; write for example {examples}")


def _bits_per_s(value: Any, examples: str) -> Decimal:
    number, unit = _split(value, examples)
    match = re.fullmatch(r"([kKMGTP]?)(bit|B)/s", unit)
    if match is None:
        raise _unknown(unit, examples)
    return _bounded(number * _DECIMAL[match[1]] * (8 if match[2] == "B" else 1), value)


def parse_bits_per_s(value: Any) -> float:
    """``25 Gbit/s`` or ``3.1 GB/s`` to bits per second. ``Gbps``, ``GBPS`` and ``Gb`` are ambiguous and refused."""
    return float(_bits_per_s(value, "25 Gbit/s or 3 GB/s"))


def parse_bytes_per_s(value: Any) -> float:
    """``5 GB/s`` (or ``40 Gbit/s``) to bytes per second."""
    return float(_bits_per_s(value, "5 GB/s or 40 Gbit/s") / 8)


def parse_bytes(value: Any) -> int:
    """``288 GB`` (decimal) or ``512 GiB`` (binary) to whole bytes."""
    examples = "288 GB or 512 GiB"
    number, unit = _split(value, examples)
    match = re.fullmatch(r"([kKMGTP]?i?)B", unit)
    prefix = None if match is None else _DECIMAL.get(match[1], _BINARY.get(match[1]))
    if prefix is None:
        raise _unknown(unit, examples)
    return int(_bounded((number * prefix).to_integral_value(), value))


def parse_size(value: Any) -> int:
    """``4 MB``, or, under a key that says so in its name, a plain number of bytes."""
    return parse_bytes(f"{value} B" if isinstance(value, int) and not isinstance(value, bool) else value)


def parse_seconds(value: Any) -> float:
    """``140 ms``, ``30 s``, ``10 min``, ``2 h``, ``7 d`` to seconds."""
    examples = "140 ms, 30 s, 10 min or 2 h"
    number, unit = _split(value, examples)
    if unit not in _TIME:
        raise _unknown(unit, examples)
    return float(_bounded(number * _TIME[unit], value, zero=True))


def parse_usd(value: Any) -> float:
    """``500 USD`` to US dollars."""
    number, unit = _split(value, "500 USD")
    if unit != "USD":
        raise _unknown(unit, "500 USD")
    return float(_bounded(number, value))


def parse_usd_per_hour(value: Any) -> float:
    """``3.50 USD/h`` to US dollars per hour."""
    number, unit = _split(value, "3.50 USD/h")
    if unit != "USD/h":
        raise _unknown(unit, "3.50 USD/h")
    return float(_bounded(number, value, zero=True))


def parse_usd_per_gb(value: Any) -> float:
    """``0.05 USD/GB`` to US dollars per 10⁹ bytes."""
    number, unit = _split(value, "0.05 USD/GB")
    if unit != "USD/GB":
        raise _unknown(unit, "0.05 USD/GB")
    return float(_bounded(number, value, zero=True))


def parse_usd_per_kwh(value: Any) -> float:
    """``0.12 USD/kWh`` to US dollars per kilowatt-hour."""
    number, unit = _split(value, "0.12 USD/kWh")
    if unit != "USD/kWh":
        raise _unknown(unit, "0.12 USD/kWh")
    return float(_bounded(number, value, zero=True))


def parse_watts(value: Any) -> float:
    """``1.4 kW`` or ``1000 W`` to watts."""
    number, unit = _split(value, "1.4 kW or 1000 W")
    if unit not in ("W", "kW"):
        raise _unknown(unit, "1.4 kW or 1000 W")
    return float(_bounded(number * _DECIMAL[unit[:-1]], value))


def parse_flops(value: Any) -> float:
    """``2250 TFLOP/s`` to floating-point operations per second."""
    number, unit = _split(value, "989 TFLOP/s")
    match = re.fullmatch(r"([kKMGTP]?)FLOP/s", unit)
    if match is None:
        raise _unknown(unit, "989 TFLOP/s")
    return float(_bounded(number * _DECIMAL[match[1]], value))


def parse_share(value: Any) -> float:
    """``5 %`` or ``0.05`` to a share between 0 and 1."""
    text = str(value).strip()
    match = re.fullmatch(_NUMBER + r"\s*(%?)", text, re.ASCII)
    if match is None or isinstance(value, bool):
        raise ValueError(f"'{text}' is not a share; write for example 5 % or 0.05")
    number = Decimal(match[1]) / (100 if match[2] else 1)
    if not 0 <= number <= 1:
        raise ValueError(f"'{text}' is not between 0 and 1 (0 % and 100 %)")
    return float(number)


def _written(unit: str) -> PlainSerializer:
    """Serialise as ``NUMBER UNIT``, so that a dumped model can be read again."""
    return PlainSerializer(lambda number: f"{number!r}".removesuffix(".0") + f" {unit}", return_type=str)


def _typed(parse: Any, unit_pattern: str, example: str) -> BeforeValidator:
    """Parse with ``parse``; editors see a text of number and unit."""
    pattern = rf"^\s*\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{{1,3}})?\s*({unit_pattern})\s*$"
    written = Annotated[str, Field(pattern=pattern, examples=[example])]
    return BeforeValidator(parse, json_schema_input_type=written)


def within(parse: Callable[[Any], float], *, least: str | None = None, most: str) -> AfterValidator:
    """Bounds of a quantity, written with their units, so that a message can say them."""
    low, high = None if least is None else parse(least), parse(most)

    def check(number: float) -> float:
        if low is not None and number < low:
            raise ValueError(f"must be at least {least}")
        if number > high:
            raise ValueError(f"must be at most {most}")
        return number

    return AfterValidator(check)


_SIZE = "([kKMGTP]|[KMGTP]i)?B"
_SIZE_NUMBER = Annotated[int, Field(ge=1)]
_SIZE_TEXT = Annotated[
    str, Field(pattern=rf"^\s*\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{{1,3}})?\s*({_SIZE})\s*$", examples=["4 MB"])
]
_RATE = "[kKMGTP]?(bit|B)/s"

BitsPerSecond: TypeAlias = Annotated[float, _typed(parse_bits_per_s, _RATE, "25 Gbit/s"), _written("bit/s")]
Bytes: TypeAlias = Annotated[int, _typed(parse_bytes, _SIZE, "512 GiB"), _written("B")]
Size: TypeAlias = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=_SIZE_NUMBER | _SIZE_TEXT)]
"""``4 MB`` or 4000000, for keys whose names say bytes."""
BytesPerSecond: TypeAlias = Annotated[float, _typed(parse_bytes_per_s, _RATE, "5 GB/s"), _written("B/s")]
Seconds: TypeAlias = Annotated[float, _typed(parse_seconds, "us|ms|s|min|h|d", "140 ms"), _written("s")]
Usd: TypeAlias = Annotated[float, _typed(parse_usd, "USD", "500 USD"), _written("USD")]
UsdPerHour: TypeAlias = Annotated[float, _typed(parse_usd_per_hour, "USD/h", "3.50 USD/h"), _written("USD/h")]
UsdPerGigabyte: TypeAlias = Annotated[float, _typed(parse_usd_per_gb, "USD/GB", "0.05 USD/GB"), _written("USD/GB")]
UsdPerKwh: TypeAlias = Annotated[float, _typed(parse_usd_per_kwh, "USD/kWh", "0.12 USD/kWh"), _written("USD/kWh")]
Watts: TypeAlias = Annotated[float, _typed(parse_watts, "k?W", "1.4 kW"), _written("W")]
Flops: TypeAlias = Annotated[float, _typed(parse_flops, "[kKMGTP]?FLOP/s", "989 TFLOP/s"), _written("FLOP/s")]
_SHARE_NUMBER = Annotated[float, Field(ge=0, le=1)]
_SHARE_TEXT = Annotated[str, Field(pattern=r"^[\d.eE+-]+\s*%?$", examples=["5 %"])]
Share: TypeAlias = Annotated[float, BeforeValidator(parse_share, json_schema_input_type=_SHARE_NUMBER | _SHARE_TEXT)]
"""``5 %`` or 0.05."""


def bytes_text(number: float) -> str:
    """``34.2 GB``: decimal, three digits."""
    return _scaled(number, "B")


def seconds_text(number: float) -> str:
    """``350 ms``, ``12.5 s``, ``14 min``, ``3.2 h``, ``25 years``, three digits."""
    if number < 1:
        return f"{_three(number * 1e3)} ms"
    for limit, unit in ((600, "s"), (7200, "min"), (7 * 86400, "h")):
        if number < limit:
            return f"{_three(number / float(_TIME[unit]))} {unit}"
    years = number / 86400 / 365.25
    if years < 10:
        return f"{_three(number / 86400)} d"
    return f"{_three(years)} years" if years < 1e6 else ">10⁶ years"


def memory_text(number: float) -> str:
    """``268 GiB``: binary, as memory is counted."""
    for prefix, scale in reversed(_BINARY.items()):
        if number >= 0.9995 * scale:
            return f"{_three(number / scale)} {prefix}B"
    return f"{_three(number)} B"


def bits_per_s_text(number: float) -> str:
    """``25 Gbit/s (3.12 GB/s)``: both forms, so that nobody is off by eight."""
    return f"{_scaled(number, 'bit/s')} ({_scaled(number / 8, 'B/s')})"


def flops_text(number: float) -> str:
    """``712 TFLOP/s``: decimal, three digits."""
    return _scaled(number, "FLOP/s")


def count_text(number: float) -> str:
    """``32.0 G``: a number with its decimal prefix, three digits."""
    return _scaled(number, "").rstrip()


def _scaled(number: float, unit: str) -> str:
    for prefix, scale in reversed(_DECIMAL.items()):
        if prefix != "K" and number >= 0.9995 * scale and scale > 1:
            return f"{_three(number / scale)} {prefix}{unit}"
    return f"{_three(number)} {unit}"


def _three(number: float) -> str:
    """Three significant digits, without an exponent."""
    if number >= 99.95 or number == 0:
        return f"{number:.0f}"
    text = f"{number:.3g}"
    return text if "e" not in text else f"{number:.6f}".rstrip("0").rstrip(".")


Deadline = Annotated[Seconds, within(parse_seconds, least="1 ms", most="30 d")]
"""A time to wait: more than nothing."""
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
