"""How many parameters a model has, exactly."""

from __future__ import annotations

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
        layer_small=norms + router,
        layer_large=attention + num_experts * matrix,
    )
