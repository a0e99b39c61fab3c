"""Quantities: compulsory units, no factor of eight or 7 %, exact round trips."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from islandctl.config import units
from islandctl.config.recipe import DataRecipe


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        (units.parse_bits_per_s, "10 Gbit/s", 10e9),
        (units.parse_bits_per_s, "1.25 GB/s", 10e9),
        (units.parse_bits_per_s, "50Mbit/s", 50e6),
        (units.parse_bits_per_s, "1e3 kbit/s", 1e6),
        (units.parse_bytes, "288 GB", 288 * 10**9),
        (units.parse_bytes, "512 GiB", 512 * 2**30),
        (units.parse_bytes, "0.1 TB", 10**11),
        (units.parse_bytes, "7 B", 7),
        (units.parse_bytes_per_s, "40 Gbit/s", 5e9),
        (units.parse_bytes_per_s, "5 GB/s", 5e9),
        (units.parse_seconds, "150 ms", 0.15),
        (units.parse_seconds, "10 min", 600.0),
        (units.parse_seconds, "0 s", 0.0),
        (units.parse_seconds, "7 d", 604800.0),
        (units.parse_usd_per_hour, "3.50 USD/h", 3.5),
        (units.parse_usd_per_gb, "0 USD/GB", 0.0),
        (units.parse_flops, "989 TFLOP/s", 989e12),
        (units.parse_share, "5 %", 0.05),
        (units.parse_share, "0.05", 0.05),
        (units.parse_share, 0.25, 0.25),
        (units.parse_share, 1, 1.0),
    ],
)
def test_quantities(parse: Callable[[Any], float], text: Any, number: float) -> None:
    assert parse(text) == number


@pytest.mark.parametrize(
    ("parse", "text", "cause"),
    [
        (units.parse_bits_per_s, 10, "'10' has no unit; write for example 25 Gbit/s or 3 GB/s"),
        (units.parse_bits_per_s, "10", "has no unit"),
        (units.parse_bits_per_s, "10 GBPS", "unit 'GBPS' is ambiguous"),
        (units.parse_bits_per_s, "10Gbps", "unit 'Gbps' is ambiguous"),
        (units.parse_bits_per_s, "10 Gb", "unit 'Gb' is ambiguous"),
        (units.parse_bits_per_s, "10 gb/s", "unit 'gb/s' is ambiguous"),
        (units.parse_bits_per_s, "10 GiB/s", "unit 'GiB/s' is unknown here"),
        (units.parse_bits_per_s, "10 parsecs", "unit 'parsecs' is unknown here"),
        (units.parse_bits_per_s, "0 Gbit/s", "is zero, which makes no sense"),
        (units.parse_bits_per_s, "-1 Gbit/s", "is negative"),
        (units.parse_bits_per_s, "nan Gbit/s", "is not a quantity"),
        (units.parse_bits_per_s, "inf bit/s", "is not a quantity"),
        (units.parse_bits_per_s, "1e300 Gbit/s", "too large to be meant"),
        (units.parse_bits_per_s, "٣ Gbit/s", "is not a quantity"),
        (units.parse_bits_per_s, True, "expected a quantity with its unit"),
        (units.parse_bits_per_s, None, "expected a quantity with its unit"),
        (units.parse_bytes, "512 Gib", "unit 'Gib' is ambiguous"),
        (units.parse_bytes, "512 G", "unit 'G' is ambiguous"),
        (units.parse_seconds, "5 m", "unit 'm' is ambiguous"),
        (units.parse_seconds, 30, "has no unit"),
        (units.parse_usd, "500", "has no unit"),
        (units.parse_usd, "500 EUR", "unit 'EUR' is unknown here"),
        (units.parse_usd, "0 USD", "is zero"),
        (units.parse_usd_per_hour, "3 EUR/h", "unit 'EUR/h' is unknown here"),
        (units.parse_usd_per_gb, "3 USD", "unit 'USD' is unknown here"),
        (units.parse_flops, "989 TFLOPS", "unit 'TFLOPS' is unknown here"),
        (units.parse_share, "5", "is not between 0 and 1"),
        (units.parse_share, "120 %", "is not between 0 and 1"),
        (units.parse_share, True, "is not a share"),
        (units.parse_share, "half", "is not a share"),
    ],
)
def test_what_is_refused(parse: Callable[[Any], float], text: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=re.escape(cause)):
        parse(text)


NUMBERS = st.floats(min_value=1e-6, max_value=1e23, allow_nan=False)
FLOATS = [
    units.BitsPerSecond,
    units.BytesPerSecond,
    units.Seconds,
    units.Usd,
    units.UsdPerHour,
    units.UsdPerGigabyte,
    units.Flops,
]


@given(NUMBERS, st.sampled_from(FLOATS))
def test_a_written_quantity_reads_back_to_the_same_bits(number: float, kind: Any) -> None:
    adapter: TypeAdapter[float] = TypeAdapter(kind)
    written = adapter.dump_python(number)
    assert isinstance(written, str)
    assert adapter.validate_python(written) == number


@given(st.integers(1, 10**23))
def test_bytes_are_exact(number: int) -> None:
    adapter: TypeAdapter[int] = TypeAdapter(units.Bytes)
    assert adapter.validate_python(adapter.dump_python(number)) == number


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "M", "G", "T"]))
def test_a_byte_is_eight_bits(number: int, prefix: str) -> None:
    as_bytes = units.parse_bits_per_s(f"{number} {prefix}B/s")
    assert as_bytes == units.parse_bits_per_s(f"{8 * number} {prefix}bit/s")
    assert units.parse_bytes_per_s(f"{number} {prefix}B/s") * 8 == as_bytes


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.bits_per_s_text(25e9), "25 Gbit/s (3.12 GB/s)"),
        (units.bits_per_s_text(50e6), "50 Mbit/s (6.25 MB/s)"),
        (units.bytes_text(32_257_566_144), "32.3 GB"),
        (units.bytes_text(999_999), "1 MB"),
        (units.bytes_text(0), "0 B"),
        (units.memory_text(288e9), "268 GiB"),
        (units.memory_text(12), "12 B"),
        (units.seconds_text(0.15), "150 ms"),
        (units.seconds_text(0.00000012), "0.00012 ms"),
        (units.seconds_text(10.3), "10.3 s"),
        (units.seconds_text(840), "14 min"),
        (units.seconds_text(9000), "2.5 h"),
        (units.seconds_text(864000), "10 d"),
        (units.count_text(31_990_611_456), "32 G"),
        (units.count_text(256), "256"),
    ],
)
def test_shown_with_three_digits(shown: str, text: str) -> None:
    assert shown == text


def test_a_size_under_a_key_that_says_bytes_may_go_without_its_unit() -> None:
    sizes = {"4 MB": 4_000_000, "1 MiB": 1 << 20, 300_000: 300_000}
    for written, num_bytes in sizes.items():
        data = DataRecipe.model_validate({"paths": ["python-stdlib"], "limit_bytes": written})
        assert data.model_dump(mode="json")["limit_bytes"] == num_bytes  # a run's hash is over this
    for wrong, says in (
        ("4", "has no unit"),
        (0, "zero"),
        (True, "quantity"),
        (1.5, "has no unit"),
        ("4 Mb", "ambiguous"),
    ):
        with pytest.raises(ValidationError, match=says):
            DataRecipe.model_validate({"paths": ["python-stdlib"], "limit_bytes": wrong})
