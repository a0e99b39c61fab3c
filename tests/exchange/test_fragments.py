from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.placement import PlacementRule
from islandctl.errors import ConfigError
from islandctl.exchange.fragments import fragment_map, is_exact

MODEL = [
    ("embed.weight", (64, 8)),
    ("norm.weight", (8,)),
    ("head.weight", (64, 8)),
    *(
        (f"blocks.{block}.{name}", shape)
        for block in range(12)
        for name, shape in {"norm": (8,), "router.weight": (4, 8), "up": (4, 8, 16), "down": (4, 16, 8)}.items()
    ),
]


RULES: tuple[PlacementRule, ...] = ("strided", "consecutive", "balanced")


@given(st.permutations(MODEL), st.integers(1, 12), st.integers(256, 5000), st.sampled_from(RULES))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_partition_is_whole_and_does_not_depend_on_order(
    shuffled: list[tuple[str, tuple[int, ...]]], num_fragments: int, chunk: int, rule: PlacementRule
) -> None:
    found = fragment_map(shuffled, num_fragments, chunk, placement=rule)
    assert found.map_hash == fragment_map(MODEL, num_fragments, chunk, placement=rule).map_hash
    placed = [placement.name for fragment in found.fragments for placement in fragment.placements]
    assert sorted(placed) == sorted(name for name, _ in MODEL)
    chunks = [chunk for fragment in found.fragments for chunk in fragment.chunks]
    assert [each.global_index for each in chunks] == list(range(len(chunks)))
    for fragment in found.fragments:
        position = 0
        for placement in fragment.placements:
            assert placement.start == position
            position = placement.end
        assert [c.index for c in fragment.chunks] == list(range(len(fragment.chunks)))
        assert [c.start for c in fragment.chunks[1:]] == [c.end for c in fragment.chunks[:-1]]
        assert fragment.chunks[0].start == 0
        assert fragment.numel == position
        assert all(0 < c.numel <= chunk for c in fragment.chunks)
        exact = sum(c.numel for c in fragment.chunks if c.exact)
        assert exact == sum(p.numel for p in fragment.placements if is_exact(p.name, p.shape))


def test_blocks_go_in_turn_and_the_rest_to_the_smallest() -> None:
    found = fragment_map(MODEL, 4, 4096)
    for index, fragment in enumerate(found.fragments):
        blocks = {int(p.name.split(".")[1]) for p in fragment.placements if p.name.startswith("blocks")}
        assert blocks == {index, index + 4, index + 8}
    assert "head.weight" in {p.name for p in found.fragments[1].placements}  # embed went to 0
    assert "embed.weight" in {p.name for p in found.fragments[0].placements}


def test_consecutive_blocks_are_neighbours() -> None:
    found = fragment_map(MODEL, 5, 4096, placement="consecutive")
    blocks = [
        sorted({int(p.name.split(".")[1]) for p in fragment.placements if p.name.startswith("blocks")})
        for fragment in found.fragments
    ]
    assert blocks == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9], [10, 11]]


def test_balanced_counts_what_travels() -> None:
    """An embedding as heavy as three blocks when it goes as bf16 and they as int8, and as 1.5 when all is fp32."""
    model = [("embed.weight", (96, 8)), *((f"blocks.{block}.up", (64, 8)) for block in range(5))]
    for codec, blocks in (("int8", 1), ("fp32", 2)):
        found = fragment_map(model, 2, 4096, placement="balanced", codec=codec)
        (beside,) = ([p.name for p in f.placements] for f in found.fragments if "embed.weight" in str(f.placements))
        assert len(beside) == 1 + blocks


def test_the_map_tells_the_rules_apart() -> None:
    heavy = [("embed.weight", (512, 8)), *MODEL[1:]]
    assert len({fragment_map(heavy, 4, 4096, placement=rule).map_hash for rule in RULES}) == 3


def test_exact_parameters_come_first_in_natural_order() -> None:
    (fragment,) = fragment_map(MODEL, 1, 10**6).fragments
    names = [placement.name for placement in fragment.placements]
    assert names.index("blocks.2.norm") < names.index("blocks.10.norm") < names.index("blocks.0.down")
    assert [chunk.exact for chunk in fragment.chunks] == [True, False]


def test_parameter_at_names_the_owner_of_a_position() -> None:
    (fragment,) = fragment_map(MODEL, 1, 1000).fragments
    for placement in fragment.placements:
        assert fragment.parameter_at(placement.start) == placement.name
        assert fragment.parameter_at(placement.end - 1) == placement.name


@pytest.mark.parametrize(
    ("parameters", "num_fragments", "reason"),
    [
        (MODEL, 13, "13 is more than the model's 12 blocks"),
        ([("a.weight", (3,))], 2, "more than the model's 0 blocks"),
        ([("a", (3,)), ("a", (3,))], 1, "twice"),
        ([("a", (3, 0))], 1, "no values"),
        ([], 1, "fragment 0 of 1 is empty"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_reason(
    parameters: list[tuple[str, tuple[int, ...]]], num_fragments: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        fragment_map(parameters, num_fragments, 1000)


def test_a_recipe_can_name_more_exact_parameters() -> None:
    plain, asked = (fragment_map(MODEL, 2, 1000, exact) for exact in ((), ("*.down", "head.*")))
    assert asked.map_hash != plain.map_hash
    for before, after in zip(plain.fragments, asked.fragments, strict=True):
        assert {p.name for p in before.placements} == {p.name for p in after.placements}
        exact = {p.name for p in after.placements if p.exact} - {p.name for p in before.placements if p.exact}
        assert exact == {p.name for p in after.placements if p.name.endswith(".down") or p.name == "head.weight"}


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no parameter fits .blocks\.99"):
        fragment_map(MODEL, 2, 1000, ("*.down", "blocks.99.*"))
