"""What a cell remembers of each fragment, and how it lies in a checkpoint: tensors only.

Keys (p: fragment, c: chunk, r: rank)::

    anchor.<p>.<c>  residual.<p>.<c>                       fp32, with the chunk's owner
    momentum.<p>.<c>  sum.<p>.<c>  held.<p>.<c>            the same: what the outer optimizer remembers, see ``outer``
    flight.<p>.vector.<c>                                  fp32, what was to be sent: pseudo-gradient plus residual
    flight.<p>.payload.<c>                                 uint8, what was sent: the encoded vector
    flight.<p>.snapshot.<parameter>.rank<r>                fp32, rank r's part of the snapshot
    meta.rank<r>                                           uint8, JSON

No two ranks have a key in common, so all ranks' dictionaries can be saved side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from islandctl.errors import CheckpointError
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.outer import OuterState
from islandctl.ledger.packet import canonical_json, digest


@dataclass
class FragmentState:
    """One fragment, as this rank owns it; tensors are replaced, never written to."""

    chunks: list[Chunk]
    """Those that this rank owns; the dictionaries' keys are their indices."""
    anchor: dict[int, Tensor]
    residual: dict[int, Tensor]
    outer: dict[int, OuterState]
    base: dict[int, str] = field(default_factory=dict)
    """Hash of each chunk's anchor and outer state."""
    version: int = 0
    """Commits that the anchor contains."""
    window: int = -1
    """Of the last round that is resolved."""
    resolved_seq: int = -1
    """Ledger seq of its commit."""
    tokens: int = 0
    """Trained since the last packet that a commit named."""
    at_end: bool = False
    """Every cell has trained its last step: a commit named all of them, with no tokens since the one before."""
    final: bool = False
    """The run's final round is in the anchor."""

    def __post_init__(self) -> None:
        self.rehash()

    def rehash(self) -> None:
        """Compute ``base`` anew."""
        self.base = {c: base_hash(self.anchor[c], self.outer[c]) for c in self.anchor}


@dataclass
class Flight:
    """A round between snapshot and apply."""

    window: int
    step: int
    """Of the snapshot."""
    apply_at: int
    tokens: int
    snapshot: dict[str, Tensor]
    """This rank's part of every parameter of the fragment; empty in the seed and in final rounds."""
    vector: dict[int, Tensor]
    payload: dict[int, Future[bytes]]
    moved: int = 0
    """By how much the cell's step counter was put forward since the snapshot."""
    started: float = 0.0
    """On the process's monotonic clock, for the deadline only."""


def base_hash(anchor: Tensor, outer: OuterState) -> str:
    """Hash of a chunk's anchor and outer state (by name): little-endian fp32, one after the other."""
    tensors = [anchor, *(outer[name] for name in sorted(outer))]
    parts = [part.numpy().astype("<f4", copy=False).tobytes() for part in tensors]
    return digest(b"".join(parts))


def done(payload: bytes) -> Future[bytes]:
    """A future that is done."""
    future: Future[bytes] = Future()
    future.set_result(payload)
    return future


def save(
    states: list[FragmentState], flights: list[Flight | None], meta: dict[str, Any], rank: int
) -> dict[str, Tensor]:
    """This rank's part of the checkpoint. Waits for packets that are being encoded, not for the network."""
    tensors: dict[str, Tensor] = {}
    for p, state in enumerate(states):
        for c in state.anchor:
            tensors[f"anchor.{p}.{c}"] = state.anchor[c]
            tensors[f"residual.{p}.{c}"] = state.residual[c]
            tensors |= {f"{name}.{p}.{c}": tensor for name, tensor in state.outer[c].items()}
    for p, flight in enumerate(flights):
        if flight is None:
            continue
        for c, vector in flight.vector.items():
            tensors[f"flight.{p}.vector.{c}"] = vector
            tensors[f"flight.{p}.payload.{c}"] = _bytes(flight.payload[c].result())
        for name, part in flight.snapshot.items():
            if part.numel():  # a rank's part of a small parameter can be empty
                tensors[f"flight.{p}.snapshot.{name}.rank{rank}"] = part
    record = meta | {
        "fragments": [
            {
                "version": state.version,
                "window": state.window,
                "resolved_seq": state.resolved_seq,
                "tokens": state.tokens,
                "at_end": state.at_end,
                "final": state.final,
            }
            for state in states
        ],
        "flights": [
            None
            if flight is None
            else {
                "window": flight.window,
                "step": flight.step,
                "apply_at": flight.apply_at,
                "tokens": flight.tokens,
                "moved": flight.moved,
                "snapshot": bool(flight.snapshot),
            }
            for flight in flights
        ],
    }
    tensors[f"meta.rank{rank}"] = _bytes(canonical_json(record))
    return tensors


def load_meta(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """The JSON part. Raises ``CheckpointError`` when it is not there or no JSON object."""
    try:
        meta = json.loads(tensors[f"meta.rank{rank}"].numpy().tobytes())
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"rank {rank}: the checkpoint has no readable state of the exchange") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"rank {rank}: the checkpoint's state of the exchange is no JSON object")
    return meta


def load(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    states: list[FragmentState],
    parts: list[dict[str, Tensor]],
    rank: int,
) -> list[Flight | None]:
    """Fill ``states`` and give back the rounds in flight.

    Args:
        tensors: what ``save`` gave on this rank.
        meta: from ``load_meta``.
        states: with this rank's chunks.
        parts: per fragment this rank's part of every parameter: shapes and devices of the snapshots.
        rank: this rank.

    Raises:
        CheckpointError: something is missing or has another shape.
    """
    flights: list[Flight | None] = []
    for p, (state, told, record) in enumerate(zip(states, meta["fragments"], meta["flights"], strict=True)):
        for chunk in state.chunks:
            c = chunk.index
            state.anchor[c] = _take(tensors, f"anchor.{p}.{c}", (chunk.numel,)).clone()
            state.residual[c] = _take(tensors, f"residual.{p}.{c}", (chunk.numel,)).clone()
            state.outer[c] = {
                name: _take(tensors, f"{name}.{p}.{c}", tuple(one.shape)).clone()
                for name, one in state.outer[c].items()
            }
        state.rehash()
        for name, value in told.items():
            setattr(state, name, value)
        flights.append(None if record is None else _load_flight(tensors, p, record, state, parts[p], rank))
    return flights


def _load_flight(
    tensors: Mapping[str, Tensor],
    p: int,
    record: Mapping[str, Any],
    state: FragmentState,
    parts: dict[str, Tensor],
    rank: int,
) -> Flight:
    snapshot = {}
    for name, part in parts.items() if record["snapshot"] else ():
        if part.numel():
            stored = _take(tensors, f"flight.{p}.snapshot.{name}.rank{rank}", tuple(part.shape))
            snapshot[name] = stored.to(part.device, copy=True)
        else:
            snapshot[name] = torch.empty_like(part)
    vector, payload = {}, {}
    for chunk in state.chunks:
        c = chunk.index
        vector[c] = _take(tensors, f"flight.{p}.vector.{c}", (chunk.numel,)).clone()
        payload[c] = done(_take(tensors, f"flight.{p}.payload.{c}", None).numpy().tobytes())
    return Flight(
        window=record["window"],
        step=record["step"],
        apply_at=record["apply_at"],
        tokens=record["tokens"],
        snapshot=snapshot,
        vector=vector,
        payload=payload,
        moved=record["moved"],
    )


def _take(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...] | None) -> Tensor:
    if key not in tensors:
        raise CheckpointError(f"the checkpoint lacks '{key}'")
    tensor = tensors[key].detach().cpu()
    if shape is not None and tuple(tensor.shape) != shape:
        raise CheckpointError(f"checkpoint: '{key}' has shape {tuple(tensor.shape)}, not {shape}")
    return tensor


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
