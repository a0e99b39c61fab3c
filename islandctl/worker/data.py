"""The text: found, split into training and held-out parts, and dealt out to cells and ranks.

Everything here depends on the content of the files alone, never on where they lie, so that sites which hold the
same text agree on every sequence without speaking to each other.

    files ── by hash of content ──┬── held out (a share of them) ── fixed sequences for evaluation
                                  └── training: b"\\0" + file + b"\\0" + file + … as one array
                                        └── sequences, in an order of (seed, epoch) ── cell i of N takes i::N
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from islandctl.config.recipe import DataRecipe
from islandctl.errors import ConfigError

STDLIB = "python-stdlib"
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
                hint="give more text, a shorter training.sequence, or another data.held_out",
            )
    held_out = _join(held)
    return Text(_join(kept), held_out, blake3(held_out.tobytes()).hexdigest(), len(documents))


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


def cut(text: Bytes, indices: NDArray[np.int64], sequence: int) -> torch.Tensor:
    """The sequences with these numbers: (len(indices), sequence + 1) int64; the last byte is only predicted."""
    rows = indices[:, None] * sequence + np.arange(sequence + 1)[None, :]
    return torch.from_numpy(text[rows].astype(np.int64))


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a random order of 0 … size−1 puts these positions: a bijection without a table.

    A four-round Feistel network over the next even number of bits, walked until it falls inside (Black &
    Rogaway 2002). Integer arithmetic only: every machine and numpy version gets the same order.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        value = result[outside]
        left, right = value >> np.uint64(half), value & mask
        for number in range(4):
            left, right = right, left ^ (_mix(right, key * 4 + number) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _mix(value: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = value + np.uint64((key + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class Sequences:
    """One cell's share of the training text, in order, with an exact place in it.

    Args:
        text: the training part.
        sequence: tokens per sequence.
        seed: of the recipe.
        cell, num_cells: this cell takes every num_cells-th sequence of the epoch's order.

    Raises:
        ConfigError: fewer sequences than cells.
    """

    def __init__(self, text: Bytes, *, sequence: int, seed: int, cell: int, num_cells: int) -> None:
        self.text, self.sequence, self.seed = text, sequence, seed
        self.cell, self.num_cells = cell, num_cells
        self.num_sequences = (len(text) - 1) // sequence
        self.per_epoch = self.num_sequences // num_cells
        if self.per_epoch < 1:
            raise ConfigError(
                f"data.paths: {len(text)} bytes of training text give {self.num_sequences} sequences of {sequence}, "
                f"fewer than the {num_cells} cells",
                hint="give more text or a shorter training.sequence",
            )
        self.consumed = 0

    def numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Numbers of the sequences that this cell takes as its ``start``-th to ``stop``-th."""
        place = np.arange(start, stop, dtype=np.int64)
        epoch, position = place // self.per_epoch, place % self.per_epoch
        result = np.empty_like(place)
        for one in np.unique(epoch):
            key = int.from_bytes(blake3(f"{self.seed}/{one}".encode()).digest(7), "little")
            chosen = epoch == one
            dealt = position[chosen] * self.num_cells + self.cell
            result[chosen] = permute(dealt, self.num_sequences, key)
        return result

    def take(self, batch: int, *, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """The next ``batch`` sequences of the cell, of which this rank gets its part: (part, sequence + 1)."""
        low, high = batch * rank // num_ranks, batch * (rank + 1) // num_ranks
        numbers = self.numbers(self.consumed + low, self.consumed + high)
        self.consumed += batch
        return cut(self.text, numbers, self.sequence)

    def state(self) -> dict[str, int]:
        """The cursor: epoch and position (sequences of this cell) in it."""
        return {"epoch": self.consumed // self.per_epoch, "position": self.consumed % self.per_epoch}

    def restore(self, state: dict[str, int]) -> None:
        """Go to a cursor that ``state`` gave."""
        self.consumed = state["epoch"] * self.per_epoch + state["position"]


def held_out_sequences(text: Bytes, *, sequence: int, count: int) -> torch.Tensor:
    """At most ``count`` sequences, spread evenly over the held-out text: (count, sequence + 1) int64."""
    available = (len(text) - 1) // sequence
    count = min(count, available)
    return cut(text, np.arange(count, dtype=np.int64) * available // count, sequence)
