"""Which parameters a matrix optimizer takes, and which stay on AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from islandctl.exchange.fragments import is_exact


def is_matrix(name: str, shape: Sequence[int], *, batch_dims: int = 0) -> bool:
    """Whether a matrix optimizer takes the parameter: a matrix that maps activations to activations.

    Norms, biases, routers, embeddings and the head stay on AdamW: their rows stand for experts or bytes, are seen
    unevenly often, and have no gradient that mixes them.

    Args:
        name: dotted.
        shape: of the parameter, leading batch dimensions included.
        batch_dims: so many leading dimensions only number copies of the parameter.
    """
    own = shape[batch_dims:]
    head = any(part == "head" or part.endswith("_head") for part in name.split("."))
    return len(own) >= 2 and not is_exact(name, own) and not head


def param_groups(
    parameters: Mapping[str, Tensor], *, weight_decay: float, batch_dims: int = 0
) -> list[dict[str, Any]]:
    """Groups for ``Shampoo``: preconditioned matrices, other matrices on AdamW, vectors on AdamW without decay.

    Args:
        parameters: by dotted name.
        weight_decay: of everything with two or more dimensions of its own.
        batch_dims: as for ``is_matrix``; the same for all parameters.
    """
    matrices, others, vectors = [], [], []
    for name, parameter in parameters.items():
        if is_matrix(name, parameter.shape, batch_dims=batch_dims):
            matrices.append((name, parameter))
        elif parameter.ndim - batch_dims >= 2:
            others.append((name, parameter))
        else:
            vectors.append((name, parameter))
    groups = [
        {"params": matrices, "precondition": True, "weight_decay": weight_decay},
        {"params": others, "precondition": False, "weight_decay": weight_decay},
        {"params": vectors, "precondition": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
