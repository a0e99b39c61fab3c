"""The fixed partition of the parameters into fragments, and of the fragments into chunks.

The same names and shapes give the same map in every cell, whatever its hardware and number of ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from islandctl.config.codec import CodecName
from islandctl.config.placement import PlacementRule, place, weight
from islandctl.errors import ConfigError
from islandctl.ledger.packet import canonical_json, digest


@dataclass(frozen=True)
class Placement:
    """A whole parameter inside its fragment."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First value in the fragment's flat coordinates."""
    exact: bool
    """Sent as bf16 whatever the recipe's codec."""

    @property
    def numel(self) -> int:
        """Values of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past its last value in the fragment's flat coordinates."""
        return self.start + self.numel


@dataclass(frozen=True)
class Chunk:
    """A fixed-size piece of a fragment: ``start`` to ``end`` in the fragment's flat coordinates."""

    index: int
    """Inside the fragment."""
    fragment: int
    global_index: int
    """Counted over all fragments; chunk g is owned by rank g mod R."""
    start: int
    end: int
    exact: bool

    @property
    def numel(self) -> int:
        """Values of the chunk."""
        return self.end - self.start


@dataclass(frozen=True)
class Fragment:
    """One part of the partition: its parameters in order, and its chunks."""

    index: int
    placements: tuple[Placement, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Values of the fragment."""
        return self.chunks[-1].end

    def parameter_at(self, position: int) -> str:
        """The name of the parameter that holds flat position ``position``."""
        starts = [placement.start for placement in self.placements]
        return self.placements[bisect_right(starts, position) - 1].name


@dataclass(frozen=True)
class FragmentMap:
    """All fragments."""

    fragments: tuple[Fragment, ...]

    @cached_property
    def map_hash(self) -> str:
        """Hash of names, shapes, order and chunk boundaries."""
        return digest(
            canonical_json(
                [
                    {
                        "parameters": [[p.name, list(p.shape), p.start, p.exact] for p in fragment.placements],
                        "chunks": [[c.start, c.end, c.exact] for c in fragment.chunks],
                    }
                    for fragment in self.fragments
                ]
            )
        )


def fragment_map(
    parameters: Sequence[tuple[str, Sequence[int]]],
    num_fragments: int,
    chunk: int,
    exact: Sequence[str] = (),
    *,
    placement: PlacementRule = "strided",
    codec: CodecName = "int8",
) -> FragmentMap:
    """Place every parameter in exactly one fragment, by one of the rules of ``config.placement``.

    A transformer block is what shares the first integer in its dotted name; it is never divided.

    Args:
        parameters: (dotted name, shape) in any order.
        num_fragments: fragments.
        chunk: values per chunk; the last chunk of a region is shorter.
        exact: patterns of names that are sent as bf16, beside those of ``is_exact``.
        placement: the rule.
        codec: how most values travel; tells ``balanced`` how many bytes they are.

    Raises:
        ConfigError: a name twice, an empty parameter, more fragments than blocks, an empty fragment, or a pattern
            that no name fits.
    """
    names = [name for name, _ in parameters]
    if len(set(names)) != len(names):
        raise ConfigError("the model names a parameter twice")
    empty = [name for name, shape in parameters if math.prod(shape) == 0]
    if empty:
        raise ConfigError(f"parameter '{empty[0]}' has no values")
    idle = next((one for one in exact if not any(fnmatchcase(name, one) for name in names)), None)
    if idle is not None:
        raise ConfigError(
            f"exchange.exact: no parameter fits '{idle}'", hint=f"the model's names look like '{names[-1]}'"
        )
    blocks = sorted({block for name in names if (block := _block(name)) is not None})
    if num_fragments > max(1, len(blocks)):
        raise ConfigError(
            f"exchange.fragments: {num_fragments} is more than the model's {len(blocks)} blocks",
            hint=f"set exchange.fragments to at most {max(1, len(blocks))}",
        )
    sizes = dict.fromkeys(blocks, 0)
    others = []
    for name, shape in parameters:
        size = math.prod(shape) * weight(placement, codec, exact=is_exact(name, shape, exact))
        block = _block(name)
        if block is None:
            others.append((-size, name))
        else:
            sizes[block] += size
    others.sort()
    of_blocks, of_others = place(list(sizes.values()), [-size for size, _ in others], num_fragments, placement)
    of_block = dict(zip(blocks, of_blocks, strict=True))
    of_other = dict(zip((name for _, name in others), of_others, strict=True))
    members: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_fragments)]
    for name, shape in parameters:
        block = _block(name)
        members[of_other[name] if block is None else of_block[block]].append((name, tuple(shape)))
    fragments: list[Fragment] = []
    num_chunks = 0
    for index, member in enumerate(members):
        if not member:
            raise ConfigError(f"exchange.fragments: fragment {index} of {num_fragments} is empty")
        fragments.append(_fragment(index, member, chunk, num_chunks, exact))
        num_chunks += len(fragments[-1].chunks)
    return FragmentMap(tuple(fragments))


def is_exact(name: str, shape: Sequence[int], patterns: Sequence[str] = ()) -> bool:
    """Norms and biases (one dimension), routers and embeddings: few values, or values that tolerate little noise.

    And what one of ``patterns`` names.
    """
    small = len(shape) <= 1 or "router" in name or "embed" in name
    return small or any(fnmatchcase(name, pattern) for pattern in patterns)


def _fragment(
    index: int, member: list[tuple[str, tuple[int, ...]]], chunk: int, first_chunk: int, patterns: Sequence[str]
) -> Fragment:
    ordered = sorted(member, key=lambda item: (not is_exact(item[0], item[1], patterns), _natural(item[0])))
    placements: list[Placement] = []
    start = 0
    for name, shape in ordered:
        placements.append(Placement(name, shape, start, is_exact(name, shape, patterns)))
        start = placements[-1].end
    border = sum(placement.numel for placement in placements if placement.exact)
    bounds = [(low, min(low + chunk, border), True) for low in range(0, border, chunk)]
    bounds += [(low, min(low + chunk, start), False) for low in range(border, start, chunk)]
    chunks = tuple(
        Chunk(number, index, first_chunk + number, low, high, exact)
        for number, (low, high, exact) in enumerate(bounds)
    )
    return Fragment(index, tuple(placements), chunks)


def _block(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``blocks.10`` after ``blocks.9``."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))
