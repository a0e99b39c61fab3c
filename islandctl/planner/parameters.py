"""How many parameters a model has, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

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
    layer: int
    """One block, all kinds together."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.norms + self.router + self.experts + self.head


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
        layer=2 * model.width + (by_kind["attention"] + by_kind["router"] + by_kind["ffn"]) // layers,
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
