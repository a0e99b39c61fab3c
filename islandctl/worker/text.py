"""The text: found, and split into training and held-out parts. No torch: a launch reads it before any worker runs.

Everything here depends on the content of the files alone, never on where they lie, so that sites which hold the
same text agree on every sequence without speaking to each other.

    files ── by hash of content ──┬── held out (a share of them) ── fixed sequences for evaluation
                                  └── training: b"\\0" + file + b"\\0" + file + … as one array
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from islandctl.config.recipe import STDLIB, DataRecipe
from islandctl.errors import ConfigError

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """The two parts of the text, each file preceded by a zero byte."""

    training: Bytes
    held_out: Bytes
    held_out_hash: str
    """blake3 of the held-out part; must be the same in all cells."""
    num_files: int


def find_files(recipe: DataRecipe) -> list[Path]:
    """The files that ``paths`` means, in no particular order, each once.

    Raises:
        ConfigError: a path does not exist, holds no file with one of the suffixes, or cannot be listed.
    """
    found: dict[Path, None] = {}
    for entry in recipe.paths:
        before = len(found)
        for path in _expand(entry, recipe.suffixes):
            found[Path(os.path.realpath(path))] = None
        if len(found) == before and not any(True for _ in _expand(entry, recipe.suffixes)):
            raise ConfigError(
                f"data.paths: '{entry}' gives no file with suffix {', '.join(recipe.suffixes)} on this node",
                hint="check data.paths and data.suffixes; the text must lie on every site",
            )
    return list(found)


def _expand(entry: str, suffixes: Sequence[str]) -> Iterator[Path]:
    if entry == STDLIB:
        yield from _walk(Path(sysconfig.get_path("stdlib")), (".py",), stdlib=True)
        return
    for match in sorted(glob.glob(os.path.expanduser(entry), recursive=True)):
        path = Path(match)
        if path.is_dir():
            yield from _walk(path, suffixes)
        elif path.is_file():
            yield path


def _walk(root: Path, suffixes: Sequence[str], *, stdlib: bool = False) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"data.paths: cannot list {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        if stdlib:
            # Generated build settings differ between builds of one Python version.
            folders[:] = [name for name in folders if name not in _NOT_STDLIB]
            names = [name for name in names if not name.startswith("_sysconfigdata")]
        for name in names:
            path = Path(folder, name)
            if name.endswith(tuple(suffixes)) and path.is_file():
                yield path


def read_text(recipe: DataRecipe, *, sequence: int) -> Text:
    """Read and split the text.

    A file is held out when its content's hash falls into the share. Where that leaves either part without a
    whole sequence (few, large files), the last share of every file is held out instead.

    Args:
        sequence: tokens per sequence, to tell whether there is enough.

    Raises:
        ConfigError: nothing found, a file cannot be read, or too little text. The message names the path.
    """
    contents: dict[bytes, bytes] = {}
    for path in find_files(recipe):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"data.paths: cannot read {path}: {error.strerror}") from error
        if content:
            contents[blake3(content).digest()] = content  # a file met twice counts once
    documents = sorted(contents.items())
    if recipe.limit_bytes is not None:
        documents = list(_limited(documents, recipe.limit_bytes))

    threshold = int(recipe.held_out * 2**64)
    held = [text for key, text in documents if int.from_bytes(key[:8], "big") < threshold]
    kept = [text for key, text in documents if int.from_bytes(key[:8], "big") >= threshold]
    if recipe.held_out > 0 and (_length(held) <= sequence or _length(kept) <= sequence):
        cuts = [(text, len(text) - int(len(text) * recipe.held_out)) for _, text in documents]
        kept = [text[:cut] for text, cut in cuts]
        held = [text[cut:] for text, cut in cuts if cut < len(text)]
    for part, texts in (("training", kept), ("held-out", held)):
        if _length(texts) <= sequence:
            raise ConfigError(
                f"data.paths: {', '.join(recipe.paths)}: {len(documents)} files leave {_length(texts)} bytes of "
                f"{part} text; one sequence needs {sequence + 1}",
                hint=_more(recipe.limit_bytes) + ", a shorter training.sequence, or another data.held_out",
            )
    held_out = _join(held)
    return Text(_join(kept), held_out, blake3(held_out.tobytes()).hexdigest(), len(documents))


def _more(limit_bytes: int | None) -> str:
    return "give more text" if limit_bytes is None else f"raise data.limit_bytes (it is {limit_bytes})"


def per_epoch(text: Bytes, *, sequence: int, num_cells: int) -> int:
    """How many sequences of the training text each cell has.

    Raises:
        ConfigError: none.
    """
    num_sequences = (len(text) - 1) // sequence
    if num_sequences < num_cells:
        raise ConfigError(
            f"data.paths: {len(text)} bytes of training text give {num_sequences} sequences of {sequence}, "
            f"fewer than the {num_cells} cells",
            hint="give more text, a larger data.limit_bytes where there is one, or a shorter training.sequence",
        )
    return num_sequences // num_cells


def _limited(documents: list[tuple[bytes, bytes]], limit_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    # By hash from the low bits, so that the limit takes held-out and training files alike.
    left = limit_bytes
    for key, text in sorted(documents, key=lambda item: item[0][8:]):
        if left <= 0:
            return
        yield key, text[:left]
        left -= len(text)


def _length(texts: list[bytes]) -> int:
    return sum(len(text) + 1 for text in texts)


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(b"\0" + text for text in texts), dtype=np.uint8)
