"""Measured figures into the site profiles, each noted there as measured; all other bytes stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

from islandctl.config.beside import read_bytes
from islandctl.config.edit import Key, edited
from islandctl.config.load import Loaded, load_site
from islandctl.config.site import SiteProfile
from islandctl.config.text import MAX_BYTES, parse
from islandctl.errors import ConfigError, UsageError
from islandctl.runs.doctor.report import Written

UNITS = {
    "wan.up": "bit/s",
    "wan.down": "bit/s",
    "wan.rtt": "s",
    "storage.write": "B/s",
    "storage.read": "B/s",
    "storage.free": "B",
    "gpu.bf16": "FLOP/s",
}
"""Keys that are written, and the unit in which they are measured. All of them are what the planner reads."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def value_text(key: str, value: float) -> str:
    """``9.42 Gbit/s``, ``142 ms``, ``812 TFLOP/s``: three digits, as a profile takes it."""
    unit = UNITS[key]
    if unit == "s":
        return f"{_three(value * 1e3)} ms" if value < 1 else f"{_three(value)} s"
    scale, prefix = next((pair for pair in _PREFIXES if value >= 0.9995 * pair[0]), (1.0, ""))
    return f"{_three(value / scale)} {prefix}{unit}"


def _three(number: float) -> str:
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{max(number, 1e-6):.3g}" if number >= 1e-3 else f"{max(number, 1e-6):.6f}".rstrip("0")


def write_profiles(
    sites: Sequence[Loaded[SiteProfile]], measured: Mapping[str, Mapping[str, float]]
) -> tuple[Written, ...]:
    """Put what was measured into the files of the sites; each whole or not at all.

    Raises:
        ConfigError: a file has changed meanwhile, or a value cannot be changed in place; nothing of it is written.
        UsageError: a file cannot be written.
    """
    written: list[Written] = []
    for site in sites:
        changes = {
            key: value_text(key, value)
            for key, value in measured.get(site.value.name, {}).items()
            if key in UNITS and value > 0
        }
        if changes:
            written += _write(site, changes)
    return tuple(written)


def _write(site: Loaded[SiteProfile], changes: dict[str, str]) -> list[Written]:
    path = os.path.realpath(site.path)
    old = read_bytes(path, max_bytes=MAX_BYTES, hint="").decode("utf-8")
    data = parse(old, site.path).data
    whole: dict[Key, str] = {place: text for key, text in changes.items() for place in (key, ("examined", key))}
    new = edited(old, whole, site.path)
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.", suffix=".yaml", delete=False
        ) as file:
            try:
                file.write(new.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, os.stat(path).st_mode & 0o7777)
                _holds(file.name, changes, site.path)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise UsageError(f"{site.path}: cannot be written: {error.strerror}", hint="chmod u+w, then again") from error
    return [Written(profile=site.path, key=key, before=_at(data, key), after=text) for key, text in changes.items()]


def _holds(path: str, changes: Mapping[str, str], name: str) -> None:
    """Does the new file load, and give these values?

    Raises:
        ConfigError: it does not.
    """
    loaded = load_site(path).value
    for key, text in changes.items():
        if loaded.found_by_doctor.get(key) != text:
            raise ConfigError(f"{name}: {key} would not be {text}", hint="change it by hand")


def _at(data: dict[str, object], key: str) -> str | None:
    section, _, field = key.partition(".")
    inner = data.get(section)
    found = inner.get(field) if isinstance(inner, dict) else None
    return None if found is None else str(found)
