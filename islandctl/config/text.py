"""Strict YAML 1.2: text in, plain values and their places out. The one module that knows yaml.

The core schema of YAML 1.2 decides what a plain scalar is: ``no``, ``on`` and ``22:22`` are text, ``010`` is ten,
``0o10`` is eight, ``0x10`` is sixteen, ``1e-5`` is a number. Keys are always text. Refused, with line and column:
duplicate keys, tags, non-finite numbers, several documents, more than ``MAX_BYTES`` of text or ``MAX_DEPTH`` levels.

An alias can make a small file explode, so it is allowed in one place only: as the value of a merge (``<<: *base``
or ``<<: [*first, *second]``), where a key written beside it wins and of several sources the first. What merging
copies counts towards ``MAX_NODES``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from islandctl.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000
_MAX_DIGITS = 100

Path: TypeAlias = tuple[str | int, ...]
Place: TypeAlias = tuple[int, int]
"""Line and column, counted from 1."""

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A file's values and where each stands.

    ``values`` and ``keys`` lead from a path (keys and list indices from the root) to the place of the value, and of
    the key before it.
    """

    data: Any
    values: dict[Path, Place]
    keys: dict[Path, Place]


@dataclass(frozen=True)
class Span:
    """Where a value stands in the text: characters ``start`` to ``end`` , counted from 0, quotes and brackets too."""

    start: int
    end: int
    column: int
    """Of its first key, counted from 0; for mappings that are not empty."""
    quote: str
    """``'`` or ``"``, ``|`` or ``>`` of a scalar; empty: plain. ``[``: a list."""
    flow: bool
    """A mapping in braces."""
    keys: dict[str, Span] | None
    """A mapping's own keys, in order, and their values' spans; None: no mapping."""
    key_quote: str = ""
    """That of the mapping's keys."""


@dataclass
class _Node:
    """One value of the file; ``entries`` holds what was merged as well."""

    place: Place
    scalar: Any = None
    items: list[_Node] | None = None
    entries: dict[str, tuple[Place, _Node]] | None = None


def parse(text: str, name: str) -> Document:
    """Read one YAML document.

    Args:
        text: the file's content.
        name: the file's name, for messages.

    Raises:
        ConfigError: not strict YAML; the message starts with ``name:line:column``.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"{name}: more than {MAX_BYTES // 1024} KiB of text", hint="is this the right file?")
    reader = _Reader(text, name)
    root = reader.read()
    values: dict[Path, Place] = {}
    keys: dict[Path, Place] = {}
    data = _unfold(root, (), values, keys, name)
    return Document(data, values, keys)


def spans(text: str, name: str) -> Span:
    """Where everything stands in a document that ``parse`` accepts, for editing single values.

    What a merge brings in is not there: it stands elsewhere.

    Raises:
        ConfigError: as ``parse``; or an anchor is set twice.
    """
    parse(text, name)
    bom = len(text) - len(text.removeprefix("\ufeff"))
    try:
        return _span(yaml.compose(text.removeprefix("\ufeff"), Loader=yaml.BaseLoader), bom)
    except yaml.MarkedYAMLError as error:  # an anchor that is set twice
        raise ConfigError(f"{name}: {error.problem}", hint="change the file by hand") from error


def _span(node: Any, offset: int) -> Span:
    start, end = node.start_mark.index + offset, node.end_mark.index + offset
    if not isinstance(node, yaml.MappingNode):
        quote = node.style or "" if isinstance(node, yaml.ScalarNode) else "["
        return Span(start, end, node.start_mark.column, quote, False, None)
    keys = {key.value: _span(value, offset) for key, value in node.value if key.value != "<<"}
    first = node.value[0][0] if node.value else node
    quotes = {key.style or "" for key, _ in node.value}
    return Span(
        start, end, first.start_mark.column, "", bool(node.flow_style), keys, quotes.pop() if len(quotes) == 1 else ""
    )


class _Reader:
    """Builds nodes from the parser's events. Recursion is bounded by ``MAX_DEPTH``."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text.removeprefix("\ufeff")
        self._name = name
        self._anchors: dict[str, _Node] = {}
        self._num_nodes = 0
        self._events: Iterator[Any] = iter(())

    def read(self) -> _Node:
        try:
            self._events = iter(yaml.parse(self._text, Loader=yaml.BaseLoader))
            next(self._events)  # the stream's start
            start = next(self._events)
            if isinstance(start, yaml.StreamEndEvent):
                raise ConfigError(f"{self._name}: the file is empty", hint="see `islandctl schema` for its keys")
            self._refuse_version(start)
            root = self._node(next(self._events), 0)
            next(self._events)  # the document's end
            following = next(self._events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            raise self._error(place, _syntax(error)) from error
        except yaml.reader.ReaderError as error:
            code = error.character if isinstance(error.character, int) else ord(error.character)
            before = self._text[: error.position]
            place = (before.count("\n") + 1, error.position - before.rfind("\n"))
            raise self._error(place, f"the character U+{code:04X} is not allowed") from error
        if not isinstance(following, yaml.StreamEndEvent):
            raise self._error(_place(following), "a second document begins here; write one document a file")
        return root

    def _node(self, event: Any, depth: int) -> _Node:
        place = _place(event)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self._error(place, f"more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise self._error(place, f"more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise self._error(place, f"alias *{event.anchor} is allowed only in a merge (<<: *{event.anchor})")
        if event.tag is not None:
            raise self._error(place, f"tag '{event.tag}' is not allowed; write the plain value")
        node = _Node(place)
        if isinstance(event, yaml.ScalarEvent):
            node.scalar = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.items = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                node.items.append(self._node(item, depth + 1))
        else:
            node.entries = self._entries(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _entries(self, depth: int) -> dict[str, tuple[Place, _Node]]:
        entries: dict[str, tuple[Place, _Node]] = {}
        merge_place: Place | None = None
        sources: list[_Node] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            place = _place(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(place, "a key must be plain text")
            if event.anchor is not None or event.tag is not None:
                raise self._error(place, "a key takes neither tag nor anchor")
            key = event.value
            if key == "<<" and event.style is None:
                if merge_place is not None:
                    raise self._error(place, f"duplicate key '<<': lines {merge_place[0]} and {place[0]}")
                merge_place = place
                sources = self._merge_sources(next(self._events))
                continue
            if not key:
                raise self._error(place, "a key is missing before ':'")
            if key in entries:
                raise self._error(place, f"duplicate key '{key}': lines {entries[key][0][0]} and {place[0]}")
            entries[key] = (place, self._node(next(self._events), depth + 1))
        for source in sources:
            for key, entry in (source.entries or {}).items():
                self._num_nodes += 1
                entries.setdefault(key, entry)
        return entries

    def _merge_sources(self, event: yaml.Event) -> list[_Node]:
        if isinstance(event, yaml.AliasEvent):
            return [self._mapping(event)]
        if not isinstance(event, yaml.SequenceStartEvent):
            raise self._error(_place(event), "a merge takes an alias (<<: *base) or a list of aliases")
        sources = []
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            if not isinstance(item, yaml.AliasEvent):
                raise self._error(_place(item), "a merge's list takes only aliases (<<: [*first, *second])")
            sources.append(self._mapping(item))
        return sources

    def _mapping(self, alias: yaml.AliasEvent) -> _Node:
        node = self._anchors.get(str(alias.anchor))
        if node is None:
            raise self._error(_place(alias), f"alias *{alias.anchor} has no anchor &{alias.anchor} before it")
        if node.entries is None:
            raise self._error(_place(alias), f"*{alias.anchor} is no mapping, only a mapping can be merged")
        return node

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        """The core schema (YAML 1.2.2, chapter 10.3.2) for a plain scalar; anything quoted is text."""
        value: str = event.value
        if event.style is not None:
            return value
        if value in _NULL:
            return None
        if value in _BOOL:
            return _BOOL[value]
        if _NOT_FINITE.fullmatch(value):
            raise self._error(_place(event), f"{value} is not a finite number")
        for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
            if pattern.fullmatch(value):
                if len(value) > _MAX_DIGITS:
                    raise self._error(_place(event), f"a number of more than {_MAX_DIGITS} digits")
                return int(value, base)
        if _FLOAT.fullmatch(value):
            if not math.isfinite(number := float(value)):
                raise self._error(_place(event), f"{value} is too large for a number")
            return number
        return value

    def _refuse_version(self, event: yaml.Event) -> None:
        version = getattr(event, "version", None)
        if version is not None and tuple(version) != (1, 2):
            raise self._error(_place(event), f"written for YAML {version[0]}.{version[1]}; this is read as YAML 1.2")

    def _error(self, place: Place, cause: str) -> ConfigError:
        return ConfigError(f"{self._name}:{place[0]}:{place[1]}: {cause}")


def _unfold(node: _Node, path: Path, values: dict[Path, Place], keys: dict[Path, Place], name: str) -> Any:
    """Plain data, and the place of every path (for a merged value: where it was written)."""
    values[path] = node.place
    if len(values) > MAX_NODES or len(path) > 2 * MAX_DEPTH:
        cause = f"merges unfold to more than {MAX_NODES} values or {2 * MAX_DEPTH} levels"
        raise ConfigError(f"{name}:{node.place[0]}:{node.place[1]}: {cause}")
    if node.items is not None:
        return [_unfold(item, (*path, index), values, keys, name) for index, item in enumerate(node.items)]
    if node.entries is None:
        return node.scalar
    data = {}
    for key, (place, child) in node.entries.items():
        keys[(*path, key)] = place
        data[key] = _unfold(child, (*path, key), values, keys, name)
    return data


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words, with the faults that people make most said plainly."""
    problem = str(error.problem or error.context or "not YAML")
    if "'\\t'" in problem:
        return "a tab cannot indent; use blanks"
    if problem == "expected <block end>, but found ':'":
        return "a key is missing before ':'"
    if "mapping values are not allowed" in problem:
        return "a second ': ' in this line; put the text in quotes"
    return problem
