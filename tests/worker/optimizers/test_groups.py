"""Which parameters are matrices."""

import pytest
import torch

from islandctl.worker.optimizers import is_matrix, param_groups


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.attention.q.weight", (8, 8), True),
        ("blocks.0.ffn.gate", (4, 8, 8), True),
        ("blocks.0.ffn.router.weight", (4, 8), False),
        ("embedding.weight", (256, 8), False),
        ("head.weight", (256, 8), False),
        ("lm_head.weight", (256, 8), False),
        ("blocks.0.heads.weight", (8, 8), True),
        ("norm.weight", (8,), False),
    ],
)
def test_a_matrix_maps_activations_to_activations(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(name, shape) is expected
    assert is_matrix(name, (3, *shape), batch_dims=1) is expected


def test_groups_hold_every_parameter_once_and_decay_what_has_two_dimensions() -> None:
    shapes = {"q": (8, 8), "embedding": (9, 8), "norm": (8,)}
    named = {name: torch.zeros(2, *shape) for name, shape in shapes.items()}
    groups = param_groups(named, weight_decay=0.1, batch_dims=1)
    told = [([name for name, _ in g["params"]], g["precondition"], g["weight_decay"]) for g in groups]
    assert told == [(["q"], True, 0.1), (["embedding"], False, 0.1), (["norm"], False, 0.0)]
