"""The state of any object, as JSON and tensors: what ``state_dict()`` gives, split for a checkpoint and put together.

JSON knows neither tensors, nor tuples, nor keys that are no text. They are written as::

    {"$tensor": KEY}   a tensor, which lies in the checkpoint under KEY
    {"$tuple": [...]}  {"$array": [dtype, [...]]}  {"$items": [[key, value], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from islandctl.errors import CheckpointError, ConfigError


class Stateful(Protocol):
    """What a checkpoint can take with it: schedulers, datasets, samplers have these two."""

    def state_dict(self) -> dict[str, Any]:
        """All that the object must remember."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from there."""


def split(value: Any, place: str) -> dict[str, Tensor]:
    """A nested value as tensors: its own ones under ``<place>/<path>``, all else as JSON (uint8) under ``place``.

    Raises:
        ConfigError: something in it is neither a tensor, nor what JSON can hold; the message names where.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(value, place, tensors))
    tensors[place] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def put_together(tensors: Mapping[str, Tensor], place: str) -> Any:
    """The value that ``split`` took apart.

    Raises:
        CheckpointError: it is not there, or not whole.
    """
    try:
        return _nested(json.loads(tensors[place].numpy().tobytes()), tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint has no whole state of '{place}'") from error


def _plain(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {"$tensor": place}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": [value.dtype.str, value.tolist()]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, list):
        return [_plain(each, f"{place}/{index}", tensors) for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_plain(each, f"{place}/{index}", tensors) for index, each in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(each, f"{place}/{key}", tensors) for key, each in value.items()}
        return {"$items": [[_plain(k, place, tensors), _plain(v, f"{place}/{k}", tensors)] for k, v in value.items()]}
    raise ConfigError(
        f"{place}: a checkpoint cannot hold a {type(value).__module__}.{type(value).__qualname__}",
        hint="let state_dict() give numbers, texts, lists, dicts and tensors only",
    )


def _nested(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_nested(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": key}:
            return tensors[key]
        case {"$tuple": items}:
            return tuple(_nested(each, tensors) for each in items)
        case {"$array": [dtype, items]}:
            return np.array(items, dtype=dtype)
        case {"$items": pairs}:
            return {_nested(key, tensors): _nested(each, tensors) for key, each in pairs}
    return {key: _nested(each, tensors) for key, each in value.items()}
