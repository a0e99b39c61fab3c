"""Tensors on disk: torch.distributed.checkpoint, with its index read without trusting it.

A checkpoint holds tensors only. Keys of the whole cell (``model/…``, ``optimizer/…``) may be sharded over the
ranks; what belongs to one rank alone lies under ``rank-<n>/``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from islandctl.errors import CheckpointError
from islandctl.worker.parallel import Ranks

INDEX = ".metadata"
Shape = tuple[tuple[int, ...], torch.dtype]
"""Size and type of a tensor in a checkpoint."""
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
        *("StorageMeta", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
"""All that torch puts into its index, besides ``torch.<dtype>``. None of it does anything when it is loaded."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")


class Reader(FileSystemReader):
    """Reads the index through the allowlist, and only files that the manifest names."""

    def __init__(self, path: Path, files: Collection[str]) -> None:
        super().__init__(path)
        self.folder, self.files = path, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.folder / INDEX, "rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("is not an index")
        for place in (metadata.storage_data or {}).values():
            if place.relative_path not in self.files:
                raise pickle.UnpicklingError(f"leads to {place.relative_path!r}, which the manifest does not name")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write every rank's part into ``path``. All ranks call it together.

    Raises:
        CheckpointError: at every rank, when any of them could not write.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                dict(tensors),
                storage_writer=FileSystemWriter(path),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot write the tensors: {_cause(error)}") from error


def shapes(path: Path, files: Collection[str]) -> dict[str, Shape]:
    """Size and type of every tensor in a checkpoint, by its key.

    Args:
        files: the names that the (verified) manifest lists.

    Raises:
        CheckpointError: the index is not what torch writes.
    """
    with _mapped(path):
        index = Reader(path, files).read_metadata().state_dict_metadata
        return {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in index.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def load(path: Path, tensors: Mapping[str, Tensor], files: Collection[str], ranks: Ranks) -> dict[str, Tensor]:
    """Fill ``tensors`` in place, and return this rank's own ones by their key after ``rank-<n>/``.

    Args:
        files: the names that the (verified) manifest lists.

    Raises:
        CheckpointError: a key is missing, a shape differs, or the index is not what torch writes.
    """
    reader = Reader(path, files)
    prefix = f"rank-{ranks.rank}/"
    with _mapped(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        index = reader.read_metadata().state_dict_metadata
        own = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        dcp_load(
            {**tensors, **own},
            storage_reader=reader,
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )
    return {key.removeprefix(prefix): tensor for key, tensor in own.items()}


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """Whatever goes wrong while reading is one kind of error."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{path / INDEX}: cannot load the checkpoint: {_cause(error)}",
            hint="move this checkpoint away and run islandctl resume; it takes the one before",
        ) from error


def _cause(error: BaseException) -> str:
    """The real reason inside torch's wrapping, on one line: the system's word if there is one, else the innermost."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    for each in chain:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    return (str(chain[-1]) or type(chain[-1]).__name__).splitlines()[0]
