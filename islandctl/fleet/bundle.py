"""Code as it is sent: named by what is in it, packed the same way every time."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import islandctl
from islandctl.fleet.delivery import Content

_SUFFIXES = (".py", ".csv", ".yaml", ".json", ".typed")
_CONTROLLER_ONLY = ("cli", "planner", "runs")
"""Packages that nothing on a node imports: fewer files to write on each."""


@dataclass(frozen=True)
class Bundle:
    """Files as they are sent."""

    hash: str
    """Of names and contents: a changed file is another hash."""
    data: bytes
    """Compressed: a line of JSON, [name, size, 1 for what may be executed] of each file, then their contents. A node
    unpacks it in half the time of a tar."""
    label: str = "code"
    """For messages."""

    @cached_property
    def content(self) -> Content:
        """To be delivered, where it is large."""
        return Content.of(self.data, self.label)


def make_bundle(package: Path | None = None) -> Bundle:
    """Pack the islandctl package (or another folder in its place, for tests)."""
    root = package or Path(islandctl.__file__).parent
    files = {}
    for path in root.rglob("*"):
        inside = path.relative_to(root)
        wanted = "__pycache__" not in inside.parts and inside.parts[0] not in _CONTROLLER_ONLY
        if path.suffix in _SUFFIXES and wanted:
            files[f"{root.name}/{inside.as_posix()}"] = (path.read_bytes(), False)
    return pack(files)


def pack(files: Mapping[str, tuple[bytes, bool]], label: str = "code") -> Bundle:
    """Pack files: path with slashes → (content, may it be executed?)."""
    total, listed, contents = hashlib.sha256(), [], []
    for name, (content, executable) in sorted(files.items()):
        entry = [name, len(content), *([1] if executable else [])]
        total.update(json.dumps(entry).encode() + content)
        listed.append(entry)
        contents.append(content)
    whole = json.dumps(listed).encode() + b"\n" + b"".join(contents)
    return Bundle(total.hexdigest()[:16], zlib.compress(whole, 9), label)
