"""How many parameters a model has, exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from islandctl.config.model import Model
from islandctl.config.recipe import ModelRecipe

Kind = Literal["embedding", "attention", "norm", "router", "ffn", "head"]


FEW: tuple[Kind, ...] = ("norm", "router", "embedding")
"""Kinds that travel as bf16 whatever the codec."""


class Tensor(Model):
    """Parameters of one kind and shape."""

    kind: Kind
    shape: tuple[int, ...]
    number: int
    """How many the model has."""

    @property
    def values(self) -> int:
        """Of all of them."""
        return self.number * math.prod(self.shape)


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


Shapes = dict[str, tuple[Kind, tuple[int, ...]]]


def of_block(model: ModelRecipe) -> Shapes:
    """The worker's parameters of one block by name; the feed-forward of a mixture is stacked, experts first."""
    width, hidden, key = model.width, model.hidden, kv_width(model)
    experts = (model.experts,) if model.experts else ()
    weight = "" if model.experts else ".weight"  # the experts' matrices are stacked, a dense layer's are modules
    found: Shapes = {
        "attention_norm.weight": ("norm", (width,)),
        "attention.q.weight": ("attention", (width, width)),
        "attention.k.weight": ("attention", (key, width)),
        "attention.v.weight": ("attention", (key, width)),
        "attention.o.weight": ("attention", (width, width)),
        "ffn_norm.weight": ("norm", (width,)),
        f"ffn.gate{weight}": ("ffn", (*experts, width, hidden)),
        f"ffn.up{weight}": ("ffn", (*experts, width, hidden)),
        f"ffn.down{weight}": ("ffn", (*experts, hidden, width)),
    }
    if model.experts:
        found["ffn.router.weight"] = ("router", (model.experts, width))
    return found


def of_none(model: ModelRecipe) -> Shapes:
    """Those in no block."""
    return {
        "embedding.weight": ("embedding", (model.vocabulary, model.width)),
        "head.weight": ("head", (model.vocabulary, model.width)),
        "norm.weight": ("norm", (model.width,)),
    }


@lru_cache(maxsize=64)
def tensors(model: ModelRecipe) -> tuple[Tensor, ...]:
    """The worker's parameters by kind and shape."""
    found = Counter(of_none(model).values())
    for one, number in Counter(of_block(model).values()).items():
        found[one] += number * model.layers
    return tuple(Tensor(kind=kind, shape=shape, number=number) for (kind, shape), number in found.items())


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


@lru_cache(maxsize=256)
def padded(model: ModelRecipe, num_ranks: int) -> int:
    """Values of all ranks together as FSDP2 holds and sends them: it cuts a tensor along its first dimension and pads
    every rank's part to the largest one's. 8 experts on 64 ranks are held and sent as if they were 64."""
    return sum(
        tensor.values // tensor.shape[0] * -(-tensor.shape[0] // num_ranks) * num_ranks for tensor in tensors(model)
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
    block = [(name, math.prod(shape), kind in FEW) for name, (kind, shape) in of_block(model).items()]
    for layer in range(model.layers):
        for name, values, few in block:
            yield NamedParameter(f"blocks.{layer}.{name}", values, few, layer)
    for name, (kind, shape) in of_none(model).items():
        yield NamedParameter(name, math.prod(shape), kind in FEW, None)
