"""Single values of a YAML text changed, everything else as it was: comments, order, line ends, every other byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from islandctl.config.text import Span, parse, spans
from islandctl.errors import ConfigError

Key: TypeAlias = str | tuple[str, ...]
"""``section.key``; or in parts, of which one may hold a point."""


def edited(text: str, changes: Mapping[Key, str], name: str) -> str:
    """The text with other values. A key that is missing comes at the end of its section, a section at the file's end.

    Args:
        changes: ``key``, ``section.key`` or ``("section", "key")`` → the value's plain text:
            ``9.4 Gbit/s``.
        name: the file's, for messages.

    Raises:
        ConfigError: the text is not strict YAML, or a value cannot be changed without touching more.
    """
    wanted = parse(text, name).data
    paths = {tuple(key.split(".")) if isinstance(key, str) else key: value for key, value in changes.items()}
    for path, value in paths.items():
        text = _one(text, list(path), value, name)
        _set(wanted, path, value)
    if parse(text, name).data != wanted:
        raise ConfigError(
            f"{name}: {', '.join(map('.'.join, paths))} cannot be changed in place", hint="change them by hand"
        )
    return text


def _set(data: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    *sections, key = path
    for section in sections:
        data = data.setdefault(section, {})
    data[key] = value


def _one(text: str, path: list[str], value: str, name: str) -> str:
    root = place = spans(text, name)
    left = list(path)
    while len(left) > 1 and place.keys is not None and left[0] in place.keys:
        place = place.keys[left.pop(0)]
    if place.keys is None:
        raise ConfigError(f"{name}: {'.'.join(path)}: its section is no mapping", hint="change it by hand")
    if len(left) == 1 and left[0] in place.keys:
        return _replaced(text, place.keys[left[0]], value, f"{name}: {'.'.join(path)}")
    return _added(text, place, left, value, '"' if root.flow and root.key_quote else "")


def _replaced(text: str, old: Span, value: str, where: str) -> str:
    if old.keys is not None or old.quote in ("|", ">", "["):
        raise ConfigError(f"{where} is not a plain value", hint="write it on one line")
    if old.start == old.end:  # nothing stands behind the colon
        return f"{text[: old.start]} {value}{text[old.start :]}"
    return text[: old.start] + old.quote + value + old.quote + text[old.end :]


def _added(text: str, place: Span, path: list[str], value: str, quote: str) -> str:
    assert place.keys is not None
    if place.flow:
        inner = f"{quote}{path[-1]}{quote}: {quote}{value}{quote}"
        for section in reversed(path[:-1]):
            inner = f"{quote}{section}{quote}: {{{inner}}}"
        if not place.keys:
            return f"{text[: place.start + 1]}{inner}{text[place.start + 1 :]}"
        at = max(span.end for span in place.keys.values())
        return f"{text[:at]}, {inner}{text[at:]}"
    end = "\r\n" if "\r\n" in text else "\n"
    lines = [f"{' ' * (place.column + 2 * depth)}{key}:" for depth, key in enumerate(path)]
    lines[-1] += f" {value}"
    if len(path) > 1:
        lines.insert(0, "")
    at = _line_end(text, _last(place))
    if text[at - 1 : at] == "\n":
        return text[:at] + end.join(lines) + end + text[at:]
    return text[:at] + end + end.join(lines) + text[at:]


def _last(place: Span) -> int:
    """Where the last value of a block mapping ends."""
    if place.flow or not place.keys:
        return place.end
    return _last(max(place.keys.values(), key=lambda span: span.end))


def _line_end(text: str, at: int) -> int:
    """Behind the line that holds ``at``, or where it begins when ``at`` is the beginning of a line."""
    if at and text[at - 1] == "\n":
        return at
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1
