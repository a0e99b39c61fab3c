"""Which fragment every part of the model goes to: sizes in, numbers of fragments out.

Without torch, since a plan needs it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Literal

from islandctl.config.codec import FACTS, CodecName

PlacementRule = Literal["strided", "consecutive", "balanced"]


def weight(rule: PlacementRule, codec: CodecName, *, exact: bool) -> int:
    """What one value counts when fragments are compared: its bits on the wire where ``rule`` balances, else 1.

    Args:
        rule: the recipe's.
        codec: the recipe's.
        exact: whether the value goes as bf16 whatever the codec.
    """
    if rule != "balanced":
        return 1
    return FACTS["bf16" if exact and codec != "fp32" else codec].bits


def place(
    blocks: Sequence[int], others: Sequence[int], num_fragments: int, rule: PlacementRule
) -> tuple[list[int], list[int]]:
    """The fragment of each transformer block, and of each parameter outside the blocks.

    ``strided``: blocks in turn (Streaming DiLoCo, arXiv 2501.18512). ``consecutive``: runs of neighbours, whose
    numbers differ by one at most. In both, each of the others goes to the fragment that is smallest then.
    ``balanced``: blocks and others alike, largest first, to the fragment that is smallest then; the largest fragment
    is at most 4/3 of the least possible (Graham's rule). Blocks stay whole.

    Args:
        blocks: sizes in the order of the model.
        others: sizes in the order in which they are placed: largest first.
        num_fragments: at least 1; at most as many as there are blocks, or no fragment may be empty.
        rule: which of the three.
    """
    sizes = [*blocks, *others]
    found, totals = [0] * len(sizes), [0] * num_fragments
    given = 0 if rule == "balanced" else len(blocks)
    for i in range(given):
        found[i] = i % num_fragments if rule == "strided" else i * num_fragments // len(blocks)
        totals[found[i]] += sizes[i]
    smallest = [(total, fragment) for fragment, total in enumerate(totals)]
    heapify(smallest)
    rest = range(given, len(sizes))
    for i in sorted(rest, key=lambda i: -sizes[i]) if rule == "balanced" else rest:
        total, found[i] = smallest[0]
        heapreplace(smallest, (total + sizes[i], found[i]))
    return found[: len(blocks)], found[len(blocks) :]
