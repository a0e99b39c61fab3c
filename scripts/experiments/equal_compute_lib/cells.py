"""What both exchanges share: the cells' fragments as flat chunks, and packets between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from islandctl.config.codec import FACTS, CodecName, Rounding
from islandctl.exchange.codecs import Codec, Key, codec_named, decode, encode
from islandctl.exchange.fragments import Chunk, FragmentMap, fragment_map
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.shards import Shards
from scripts.experiments.equal_compute_lib.model import Values

Chunks = dict[int, Tensor]
"""By chunk index inside the fragment, fp32."""


@dataclass
class Link:
    """What the cells have sent."""

    bytes_up: int = 0
    """Payloads of all cells."""
    cosines: list[float] = field(default_factory=list)
    """Between the first two cells' contributions, a round each."""


class Cells:
    """Stacked values, seen as one set of parameters a cell.

    Args:
        values: (C, *shape) each; written to in place.
        fragments: parts of the partition.
        chunk: values per chunk.
        codec: what ``is_exact`` goes as bf16.
        rounding, feedback: None: the codec's usual ones.
        seed: of the codecs' random bits.
    """

    def __init__(
        self,
        values: Values,
        *,
        fragments: int,
        chunk: int,
        codec: CodecName,
        rounding: Rounding | None,
        feedback: float | None,
        seed: int,
    ) -> None:
        self.num_cells = next(iter(values.values())).shape[0]
        self.map: FragmentMap = fragment_map(
            [(name, tuple(value.shape[1:])) for name, value in values.items()], fragments, chunk
        )
        ranks = Ranks(None)
        self._shards = [
            Shards({name: value.detach()[cell] for name, value in values.items()}, ranks)
            for cell in range(self.num_cells)
        ]
        self._codec, self._seed = codec_named(codec, rounding=rounding), seed
        self.beta = FACTS[codec].feedback if feedback is None else feedback
        self.link = Link()

    def gather(self, cell: int, p: int) -> Chunks:
        """The fragment's present values."""
        return self._shards[cell].gather(self.map.fragments[p])

    def local(self, cell: int, p: int) -> Values:
        """The cell's parameters of the fragment; writing to them changes the model."""
        return {one.name: self._shards[cell].local(one.name) for one in self.map.fragments[p].placements}

    def scatter(self, p: int, chunks: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter) of what the chunks hold."""
        return self._shards[0].scatter(self.map.fragments[p], chunks)

    def send(self, vector: Tensor, chunk: Chunk, cell: int, window: int, *, exact: bool) -> Tensor:
        """What the others decode of ``vector``.

        Args:
            exact: a final round: fp32.
        """
        key = Key(self._seed, cell, chunk.fragment, window, chunk.index)
        payload = encode(self._codec_of(chunk, exact), vector, key)
        self.link.bytes_up += len(payload)
        return decode(payload)

    def _codec_of(self, chunk: Chunk, exact: bool) -> Codec:
        if exact:
            return codec_named("fp32")
        return codec_named("bf16") if chunk.exact and self._codec.name != "fp32" else self._codec


def cosine(left: Mapping[int, Tensor], right: Mapping[int, Tensor]) -> float:
    """Between two contributions; 0 when one is zero."""
    one, two = (torch.cat([part.double() for part in side.values()]) for side in (left, right))
    norm = float(one.norm() * two.norm())
    return float(one @ two) / norm if norm else 0.0
