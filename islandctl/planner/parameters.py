"""How many parameters a model has, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from islandctl.config.model import Model
from islandctl.config.recipe import ModelRecipe


class Counts(Model):
    """Parameters by kind, over all layers."""

    embedding: int
    attention: int
    norms: int
    router: int
    experts: int
    """The feed-forward matrices; of a dense model its one feed-forward."""
    head: int
    active: int
    """Parameters that one token is multiplied with: everything but the embedding (a look-up) and idle experts."""
    layer: int
    """One block, all kinds together."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.norms + self.router + self.experts + self.head


def kv_width(model: ModelRecipe) -> int:
    """Width of all keys (or values) of one token."""
    return model.width // model.heads * (model.kv_heads or model.heads)


def parameters(model: ModelRecipe) -> Counts:
    """Count the worker's decoder.

    With width d, layers L, key width k, hidden h, experts E of which A active, vocabulary V::

        embedding  V·d
        attention  L·(d² + 2·d·k + d²)        query, key and value, output; no biases
        norms      L·2·d + d                   two a block, one before the head
        router     L·d·E                       moe only
        experts    L·E·3·d·h                   SwiGLU: gate, up, down; dense: E = 1
        head       V·d                         not tied to the embedding
        active     attention + norms + router + L·A·3·d·h + head
    """
    num_experts = model.experts or 1
    num_active = model.active_experts or 1
    matrix = 3 * model.width * model.hidden
    attention = 2 * model.width**2 + 2 * model.width * kv_width(model)
    router = model.width * model.experts if model.experts else 0
    norms = 2 * model.width
    layers = model.layers
    vocabulary = model.vocabulary * model.width
    return Counts(
        embedding=vocabulary,
        attention=layers * attention,
        norms=layers * norms + model.width,
        router=layers * router,
        experts=layers * num_experts * matrix,
        head=vocabulary,
        active=layers * (attention + norms + router + num_active * matrix) + model.width + vocabulary,
        layer=norms + router + attention + num_experts * matrix,
    )


class NamedParameter(NamedTuple):
    """One parameter of the worker's decoder."""

    name: str
    values: int
    few: bool
    """Of a norm, a router or the embedding."""
    layer: int | None
    """Number of its block; None: in none."""


def named_parameters(model: ModelRecipe) -> Iterator[NamedParameter]:
    """All of them: block by block, then what is in none, the largest first."""
    width, key, matrix = model.width, kv_width(model), (model.experts or 1) * model.width * model.hidden
    weight = "" if model.experts else ".weight"  # the experts' matrices are stacked, a dense layer's are modules
    of_block = {
        "attention_norm.weight": (width, True),
        "attention.q.weight": (width * width, False),
        "attention.k.weight": (width * key, False),
        "attention.v.weight": (width * key, False),
        "attention.o.weight": (width * width, False),
        "ffn_norm.weight": (width, True),
        f"ffn.gate{weight}": (matrix, False),
        f"ffn.up{weight}": (matrix, False),
        f"ffn.down{weight}": (matrix, False),
    }
    if model.experts:
        of_block["ffn.router.weight"] = (width * model.experts, True)
    for layer in range(model.layers):
        for name, (values, few) in of_block.items():
            yield NamedParameter(f"blocks.{layer}.{name}", values, few, layer)
    yield NamedParameter("embedding.weight", model.vocabulary * width, True, None)
    yield NamedParameter("head.weight", model.vocabulary * width, False, None)
    yield NamedParameter("norm.weight", width, True, None)
