"""The kinds of ledger entry.

An entry is chained: ``hash`` covers everything but itself, ``previous`` is the hash of the entry before. The
wall-clock time ``at`` is for people; nothing is decided by it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from islandctl.config.model import Model


class _Entry(Model):
    seq: int = Field(ge=0)
    attempt: int = Field(ge=1)
    at: str
    """UTC, ISO 8601."""
    previous: str
    hash: str = ""


class Genesis(_Entry):
    """The first entry: which run this is."""

    kind: Literal["genesis"] = "genesis"
    run: str
    config_hash: str
    cells: tuple[str, ...]
    num_fragments: int


class Contribution(Model):
    """One cell's part of a commit."""

    cell: int
    step: int = Field(ge=0)
    """The cell's step counter at its snapshot."""
    tokens: int
    chunks: tuple[str, ...]
    """Hash of each chunk's whole packet, in chunk order."""


class Commit(_Entry):
    """The one record of a round: which packets count. Empty ``named`` means: the anchor stands."""

    kind: Literal["commit"] = "commit"
    fragment: int
    window: int
    version: int
    """The fragment's version after this commit (unchanged when ``named`` is empty). Of a pair: the next window."""
    named: tuple[Contribution, ...]
    """In cell order."""
    missing: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None
    """In a butterfly the two cells whose round this is, the lower number first. Not written where there is none."""
    reason: Literal["complete", "deadline", "alone"]

    @model_serializer(mode="wrap")
    def _without_no_pair(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run without pairs has the same lines, and hashes, as before there were any."""
        fields: dict[str, Any] = write(self)
        if fields.get("pair") is None:
            fields.pop("pair", None)
        return fields

    def concerns(self, cell: int) -> bool:
        """Whether the round is one of this cell's."""
        return self.pair is None or cell in self.pair


class Checkpoint(_Entry):
    """One cell has a whole checkpoint on disk."""

    kind: Literal["checkpoint"] = "checkpoint"
    cell: int
    step: int
    manifest: str
    """Hash of the checkpoint's manifest file."""
    versions: tuple[int, ...]
    """Version of every fragment at that step (in a butterfly: windows behind it). Cells' checkpoints are joint when
    step and versions agree."""


class Rewind(_Entry):
    """All cells go back to a joint checkpoint; ``attempt`` is the new number."""

    kind: Literal["rewind"] = "rewind"
    step: int
    """0 with no manifests: from the beginning."""
    manifests: tuple[str, ...]
    """In cell order."""
    versions: tuple[int, ...]


class Stop(_Entry):
    """All cells checkpoint and end at the apply step of the first commit after this entry."""

    kind: Literal["stop"] = "stop"
    reason: str


class Halt(_Entry):
    """The run must not go on: replicas disagree, or a cell asked for it."""

    kind: Literal["halt"] = "halt"
    cell: int
    fragment: int | None = None
    window: int | None = None
    reason: str


Entry = Annotated[Genesis | Commit | Checkpoint | Rewind | Stop | Halt, Field(discriminator="kind")]
ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry, config=ConfigDict(defer_build=True))
"""Reads and writes any entry: ``ENTRY.validate_json(line)``."""
