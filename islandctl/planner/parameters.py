"""How many parameters a model has, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from islandctl.config.model import Model
from islandctl.config.recipe import ModelRecipe

Kind = Literal["embedding", "attention", "norm", "router", "ffn", "head"]


class Tensor(Model):
    """Parameters of one shape."""

    kind: Kind
    shape: tuple[int, ...]
    number: int
    """How many the model has."""

    @property
    def values(self) -> int:
        """Of all of them."""
        size = self.number
        for length in self.shape:
            size *= length
        return size


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
    layer_small: int
    """Norms and router of one block."""
    layer_large: int
    """Attention and experts of one block."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.norms + self.router + self.experts + self.head

    @property
    def layer(self) -> int:
        """One block, all kinds together."""
        return self.layer_small + self.layer_large


def kv_width(model: ModelRecipe) -> int:
    """Width of all keys (or values) of one token."""
    return model.width // model.heads * (model.kv_heads or model.heads)


@lru_cache(maxsize=64)
def tensors(model: ModelRecipe) -> tuple[Tensor, ...]:
    """The worker's parameters by shape; the feed-forward of a mixture is stacked, experts first."""
    return tuple(_tensors(model))


def _tensors(model: ModelRecipe) -> Iterator[Tensor]:
    width, hidden, layers = model.width, model.hidden, model.layers
    experts = (model.experts,) if model.experts else ()
    yield Tensor(kind="embedding", shape=(model.vocabulary, width), number=1)
    yield Tensor(kind="attention", shape=(width, width), number=2 * layers)
    yield Tensor(kind="attention", shape=(kv_width(model), width), number=2 * layers)
    yield Tensor(kind="norm", shape=(width,), number=2 * layers + 1)
    if model.experts:
        yield Tensor(kind="router", shape=(model.experts, width), number=layers)
    yield Tensor(kind="ffn", shape=(*experts, width, hidden), number=2 * layers)
    yield Tensor(kind="ffn", shape=(*experts, hidden, width), number=layers)
    yield Tensor(kind="head", shape=(model.vocabulary, width), number=1)


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
    by_kind: dict[Kind, int] = dict.fromkeys(("embedding", "attention", "norm", "router", "ffn", "head"), 0)
    for tensor in tensors(model):
        by_kind[tensor.kind] += tensor.values
    layers = model.layers
    used = by_kind["ffn"] // (model.experts or 1) * (model.active_experts or 1)
    return Counts(
        embedding=by_kind["embedding"],
        attention=by_kind["attention"],
        norms=by_kind["norm"],
        router=by_kind["router"],
        experts=by_kind["ffn"],
        head=by_kind["head"],
        active=by_kind["attention"] + by_kind["norm"] + by_kind["router"] + used + by_kind["head"],
        layer_small=2 * model.width + by_kind["router"] // layers,
        layer_large=(by_kind["attention"] + by_kind["ffn"]) // layers,
    )
