from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config.placement import PlacementRule, place, weight

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=30)
RULES = st.sampled_from(["strided", "consecutive", "balanced"])


@given(SIZES, SIZES, RULES, st.data())
def test_everything_has_one_place_and_no_fragment_is_empty(
    blocks: list[int], others: list[int], rule: PlacementRule, data: st.DataObject
) -> None:
    num = data.draw(st.integers(1, len(blocks)))
    of_blocks, of_others = place(blocks, others, num, rule)
    assert (len(of_blocks), len(of_others)) == (len(blocks), len(others))
    assert {*of_blocks, *of_others} == set(range(num))


@given(SIZES, st.data())
def test_blocks_in_runs_and_in_turn(blocks: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(blocks)))
    runs, _ = place(blocks, [], num, "consecutive")
    assert runs == sorted(runs)
    turns, _ = place(blocks, [], num, "strided")
    for found in (runs, turns):
        counts = [found.count(fragment) for fragment in range(num)]
        assert max(counts) - min(counts) <= 1
    assert turns[: num + 1] == [*range(num), 0][: len(blocks)]


@given(SIZES, SIZES, st.data())
def test_balanced_keeps_grahams_bound(blocks: list[int], others: list[int], data: st.DataObject) -> None:
    """The fragment that ends up largest was the smallest before its last, smallest part came."""
    num = data.draw(st.integers(1, len(blocks)))
    of_blocks, of_others = place(blocks, others, num, "balanced")
    parts: list[list[int]] = [[] for _ in range(num)]
    for size, fragment in zip([*blocks, *others], [*of_blocks, *of_others], strict=True):
        parts[fragment].append(size)
    totals = [sum(each) for each in parts]
    largest = totals.index(max(totals))
    assert totals[largest] - min(parts[largest]) <= min(totals)


def test_balanced_makes_up_for_a_heavy_embedding() -> None:
    """Four blocks and an embedding of two blocks' size: 3 and 3, where the blocks in turn would give 4 and 2."""
    sizes = [10] * 4
    for rule, largest in (("strided", 40), ("consecutive", 40), ("balanced", 30)):
        of_blocks, of_others = place(sizes, [20], 2, rule)  # type: ignore[arg-type]
        totals = [0, 0]
        for size, fragment in zip([*sizes, 20], [*of_blocks, *of_others], strict=True):
            totals[fragment] += size
        assert max(totals) == largest


@pytest.mark.parametrize(
    ("codec", "exact", "bits"), [("int8", True, 16), ("int8", False, 8), ("bf16", True, 16), ("fp32", True, 32)]
)
def test_a_value_weighs_its_bits_only_where_bytes_are_balanced(codec: str, exact: bool, bits: int) -> None:
    assert weight("balanced", codec, exact=exact) == bits
    assert weight("strided", codec, exact=exact) == weight("consecutive", codec, exact=exact) == 1
