"""What one token leaves behind in the forward pass, for the backward pass to find."""

from __future__ import annotations

from islandctl.config.recipe import ModelRecipe
from islandctl.planner.parameters import kv_width

LOGIT_BYTES = 12
"""A token and vocabulary entry at the loss: the logits, their fp32 logarithm of softmax, its gradient, and the
gradient of the logits (2 + 4 + 4 + 2 in bfloat16). With large vocabularies this decides the peak."""


def compute_bytes(precision: str) -> int:
    """Bytes of a value in the forward pass. float8 is used inside matrix products only; what is kept is bfloat16."""
    return 4 if precision == "float32" else 2


def block_bytes(model: ModelRecipe, precision: str, recompute: str) -> int:
    """Kept for one token by one block.

    With width d, key width k, hidden h (dense: A = 1), active experts A, experts E, and c bytes a value::

        none       c·(7·d + 3·k) + c·A·(4·h + 2·d) + 4·E    norms' inputs and outputs, rotated q and k, v, attention's
                                                             output, residual; gate, up, silu, product; an expert's
                                                             gathered input and output, and the router (both moe only)
        selective  c·(3·d + k) + c·A·(h + d) + 4·E           the block's input, q, v, attention's output, gate, down:
                                                             every second product, the dear attention, nothing else
        full       c·d                                       the block's input

    Attention's scores are never stored (fused attention).

    Raises:
        ValueError: no such way of recomputing.
    """
    width, hidden, size = model.width, model.hidden, compute_bytes(precision)
    active, router = model.active_experts or 1, 4 * (model.experts or 0)
    gathered = 2 * width if model.experts else 0
    match recompute:
        case "none":
            return size * (7 * width + 3 * kv_width(model) + active * (4 * hidden + gathered)) + router
        case "selective":
            return size * (3 * width + kv_width(model) + active * (hidden + width)) + router
        case "full":
            return size * width
        case _:
            raise ValueError(f"no activations known for recompute {recompute}")


def token_bytes(model: ModelRecipe, precision: str, recompute: str) -> int:
    """Kept for one token by the whole model at the peak, which is the loss: all blocks, one block that is computed
    again, and the logits."""
    again = 0 if recompute == "none" else block_bytes(model, precision, "none")
    return model.layers * block_bytes(model, precision, recompute) + again + LOGIT_BYTES * model.vocabulary
