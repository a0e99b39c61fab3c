"""What a checkpoint holds, for comparison with another one's."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from islandctl.worker.tensors import Reader


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, sharded ones whole, by their keys."""
    names = [file["name"] for file in json.loads((checkpoint / "manifest.json").read_text())["files"]]
    reader = Reader(checkpoint, names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        index = reader.read_metadata().state_dict_metadata
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


def state_hashes(checkpoint: Path) -> dict[str, str]:
    """Key → hash of everything that the training goes on from.

    Of the exchange's bookkeeping the position in the ledger is left out: a rewind is an entry of its own.
    """
    found = {}
    for key, tensor in read_tensors(checkpoint).items():
        content = tensor.contiguous().numpy().tobytes()
        if "/island/meta." in key:
            meta = json.loads(content)
            for fragment in meta["fragments"]:
                del fragment["resolved_seq"]
            content = json.dumps(meta, sort_keys=True).encode()
        found[key] = hashlib.sha256(content).hexdigest()
    return found


def model_hashes(checkpoint: Path) -> dict[str, str]:
    """Key → hash of the model's weights alone."""
    return {key: value for key, value in state_hashes(checkpoint).items() if key.startswith("model/")}
