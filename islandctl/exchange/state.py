"""What a cell remembers of each fragment, and how it lies in a checkpoint: tensors only.

Keys (p: fragment, c: chunk, r: rank)::

    anchor.<p>.<c>  residual.<p>.<c>                       fp32, with the chunk's owner
    momentum.<p>.<c>  sum.<p>.<c>  held.<p>.<c>            the same: what the outer optimizer remembers, see ``outer``
    reference<b>.<p>.<c>  residual<b>.<p>.<c>              the same in a butterfly, of the pair by bit b
    flight.<p>.vector.<c>                                  fp32, what was to be sent, residual included
    flight.<p>.payload.<c>                                 uint8, what was sent: the encoded vector
    flight.<p>.snapshot.<parameter>.rank<r>                fp32, rank r's part of the snapshot
    meta.rank<r>                                           uint8, JSON

No two ranks have a key in common, so all ranks' dictionaries can be saved side by side.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from islandctl.errors import CheckpointError
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.outer import OuterState
from islandctl.ledger.packet import canonical_json, digest


@dataclass(kw_only=True)
class FragmentState(ABC):
    """One fragment, as this rank owns it; tensors are replaced, never written to."""

    chunks: list[Chunk]
    """Those that this rank owns; the keys of the tensors are their indices."""
    version: int = 0
    """As in the ledger: commits that the anchor contains; in a butterfly windows behind it."""
    window: int = -1
    """Of the last round that is resolved."""
    resolved_seq: int = -1
    """Ledger seq of its commit."""
    tokens: int = 0
    """Trained since the last packet that a commit named."""
    at_end: bool = False
    """Every cell has trained its last step: a commit named all of them, with no tokens since the one before."""
    final: bool = False
    """The run's final round, or the last of them, is behind it."""

    @abstractmethod
    def kept(self, chunk: int) -> dict[str, Tensor]:
        """What a checkpoint keeps of a chunk, by the first part of its keys."""

    @abstractmethod
    def restore(self, chunk: int, kept: dict[str, Tensor]) -> None:
        """Take it over."""

    @abstractmethod
    def rehash(self) -> None:
        """Compute the hashes anew, after ``restore``."""


@dataclass(kw_only=True)
class AnchorState(FragmentState):
    """With one anchor for all cells."""

    anchor: dict[int, Tensor]
    residual: dict[int, Tensor]
    outer: dict[int, OuterState]
    base: dict[int, str] = field(default_factory=dict)
    """Hash of each chunk's anchor and outer state."""

    def __post_init__(self) -> None:
        self.rehash()

    def kept(self, chunk: int) -> dict[str, Tensor]:
        return {"anchor": self.anchor[chunk], "residual": self.residual[chunk], **self.outer[chunk]}

    def restore(self, chunk: int, kept: dict[str, Tensor]) -> None:
        self.anchor[chunk], self.residual[chunk] = kept["anchor"], kept["residual"]
        self.outer[chunk] = {name: kept[name] for name in self.outer[chunk]}

    def rehash(self) -> None:
        self.base = {c: outer_hash(self.anchor[c], self.outer[c]) for c in self.anchor}


@dataclass(kw_only=True)
class PairState(FragmentState):
    """With a reference and a residual for each of the k partners; the index is the bit of the pair."""

    reference: list[dict[int, Tensor]]
    residual: list[dict[int, Tensor]]
    base: list[dict[int, str]] = field(default_factory=list)
    """Hash of each chunk's reference."""

    def __post_init__(self) -> None:
        self.rehash()

    def kept(self, chunk: int) -> dict[str, Tensor]:
        found = {f"reference{bit}": store[chunk] for bit, store in enumerate(self.reference)}
        return found | {f"residual{bit}": store[chunk] for bit, store in enumerate(self.residual)}

    def restore(self, chunk: int, kept: dict[str, Tensor]) -> None:
        for bit in range(len(self.reference)):
            self.reference[bit][chunk] = kept[f"reference{bit}"]
            self.residual[bit][chunk] = kept[f"residual{bit}"]

    def rehash(self) -> None:
        # All references begin as one and the same tensor: it is hashed once.
        known: dict[int, str] = {}
        self.base = []
        for store in self.reference:
            for value in store.values():
                if id(value) not in known:
                    known[id(value)] = base_hash(value)
            self.base.append({c: known[id(value)] for c, value in store.items()})


@dataclass
class Flight:
    """A round between snapshot and apply."""

    window: int
    step: int
    """Of the snapshot."""
    apply_at: int
    tokens: int
    snapshot: dict[str, Tensor]
    """This rank's part of every parameter of the fragment; empty where nobody trains meanwhile."""
    vector: dict[int, Tensor]
    payload: dict[int, Future[bytes]]
    moved: int = 0
    """By how much the cell's step counter was put forward since the snapshot."""
    started: float = 0.0
    """On the process's monotonic clock, for the deadline only."""


def base_hash(*parts: Tensor) -> str:
    """Hash of what a chunk's packets build on: little-endian fp32, one after the other."""
    return digest(b"".join(part.numpy().astype("<f4", copy=False).tobytes() for part in parts))


def outer_hash(anchor: Tensor, outer: OuterState) -> str:
    """The same of an anchor and its outer state, that by name."""
    return base_hash(anchor, *(outer[name] for name in sorted(outer)))


def done(payload: bytes) -> Future[bytes]:
    """A future that is done."""
    future: Future[bytes] = Future()
    future.set_result(payload)
    return future


def save(
    states: Sequence[FragmentState], flights: list[Flight | None], meta: dict[str, Any], rank: int
) -> dict[str, Tensor]:
    """This rank's part of the checkpoint. Waits for packets that are being encoded, not for the network."""
    tensors: dict[str, Tensor] = {}
    for p, state in enumerate(states):
        for chunk in state.chunks:
            for kind, tensor in state.kept(chunk.index).items():
                tensors[f"{kind}.{p}.{chunk.index}"] = tensor
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
    states: Sequence[FragmentState],
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
            kept = {
                kind: _take(tensors, f"{kind}.{p}.{c}", tuple(one.shape)).clone()
                for kind, one in state.kept(c).items()
            }
            state.restore(c, kept)
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
