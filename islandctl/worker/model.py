"""The model: a decoder-only transformer, dense or with a mixture of experts in every block.

Shapes are written behind a tensor's name:

    B sequences   S positions   N = B·S tokens   D width   V vocabulary
    H heads       K key/value heads              C = D/H channels of a head
    E experts     A active experts of a token    F hidden width   L blocks

Sources: RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021), SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islandctl.config.recipe import ModelRecipe
from islandctl.worker.experts import Experts

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Routing:
    """What the routers of all blocks decided for one batch. Both are empty (0, 0) in a dense model."""

    counts_LE: Tensor
    """Assignments to each expert; float32, without gradient."""
    probs_LE: Tensor
    """Sum over the tokens of each expert's probability; float32, with gradient."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in the width; same shape and type back."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), 1e-6).to(x.dtype)


def rotary_angles(length: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each (length, channels / 2), float32."""
    exponent = torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROTARY_BASE**-exponent)
    return angle.cos(), angle.sin()


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of channels by its position's angle."""
    a, b = x_BHSC.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHSC.dtype)


class Attention(nn.Module):
    """Causal self-attention, with fewer key/value heads than heads where the recipe says so."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.heads, self.kv_heads = recipe.heads, recipe.kv_heads or recipe.heads
        self.channels = recipe.width // recipe.heads
        self.q = nn.Linear(recipe.width, self.heads * self.channels, bias=False)
        self.k = nn.Linear(recipe.width, self.kv_heads * self.channels, bias=False)
        self.v = nn.Linear(recipe.width, self.kv_heads * self.channels, bias=False)
        self.o = nn.Linear(self.heads * self.channels, recipe.width, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D); a position sees itself and what is before it."""
        size, length, _ = x_BSD.shape
        q_BHSC = self.q(x_BSD).view(size, length, self.heads, self.channels).transpose(1, 2)
        k_BKSC = self.k(x_BSD).view(size, length, self.kv_heads, self.channels).transpose(1, 2)
        v_BKSC = self.v(x_BSD).view(size, length, self.kv_heads, self.channels).transpose(1, 2)
        y_BHSC = F.scaled_dot_product_attention(
            rotate(q_BHSC, cos, sin),
            rotate(k_BKSC, cos, sin),
            v_BKSC,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return cast(Tensor, self.o(y_BHSC.transpose(1, 2).flatten(2)))


class Dense(nn.Module):
    """SwiGLU."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.gate = nn.Linear(recipe.width, recipe.hidden, bias=False)
        self.up = nn.Linear(recipe.width, recipe.hidden, bias=False)
        self.down = nn.Linear(recipe.hidden, recipe.width, bias=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, None]:
        """(B, S, D) to (B, S, D); no routing."""
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD)), None


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(recipe.width)
        self.attention = Attention(recipe)
        self.ffn_norm = RMSNorm(recipe.width)
        self.ffn: nn.Module = Experts(recipe) if recipe.kind == "moe" else Dense(recipe)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(B, S, D) to (B, S, D), and the routing of a mixture."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        y_BSD, routing = self.ffn(self.ffn_norm(x_BSD))
        return x_BSD + y_BSD, routing


class Decoder(nn.Module):
    """Embedding, blocks, norm and an untied head; no biases."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        # All values come from ``initialise``; a draw, which is what it does by itself, would load torch's compiler.
        self.embedding = nn.Embedding(
            recipe.vocabulary, recipe.width, _weight=torch.empty(recipe.vocabulary, recipe.width)
        )
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm = RMSNorm(recipe.width)
        self.head = nn.Linear(recipe.width, recipe.vocabulary, bias=False)

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Routing]:
        """Token numbers (int64) to logits (B, S, V) for the next token, and the routing of all blocks."""
        x_BSD = self.embedding(tokens_BS)
        cos, sin = rotary_angles(tokens_BS.shape[1], self.recipe.width // self.recipe.heads, tokens_BS.device)
        routings = []
        for block in self.blocks:
            x_BSD, routing = block(x_BSD, cos, sin)
            if routing is not None:
                routings.append(routing)
        logits_BSV = self.head(self.norm(x_BSD))
        if not routings:
            empty = x_BSD.new_zeros((0, 0), dtype=torch.float32)
            return logits_BSV, Routing(empty, empty)
        counts, probs = zip(*routings, strict=True)
        return logits_BSV, Routing(torch.stack(counts).detach(), torch.stack(probs))


def initialise(model: Decoder, seed: int) -> None:
    """Set every parameter from ``seed`` and its name, in place.

    Each matrix (each expert's matrix by itself) has its own generator on the processor, so the values depend
    neither on how many ranks share the model nor on the device. A rank draws only the experts that it holds.
    """
    residual = 1.0 / math.sqrt(2 * model.recipe.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                _local(parameter).fill_(1.0)
                continue
            # Inputs are the last dimension of a Linear's weight, but the first of an expert's matrix.
            fan_in = parameter.shape[1] if parameter.ndim == 3 or "embedding" in name else parameter.shape[-1]
            scale = residual if ".attention.o." in name or ".ffn.down" in name else 1.0
            _fill(parameter, f"{seed}/{name}", std=scale / math.sqrt(fan_in))


def _fill(parameter: nn.Parameter, key: str, *, std: float) -> None:
    local = _local(parameter)
    first = _first_row(parameter)
    if parameter.ndim == 3:
        for row in range(local.shape[0]):
            local[row].copy_(_normal(tuple(parameter.shape[1:]), f"{key}/{first + row}", std))
    else:
        local.copy_(_normal(tuple(parameter.shape), key, std)[first : first + local.shape[0]])


def _normal(shape: tuple[int, ...], key: str, std: float) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(blake3(key.encode()).digest(8), "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _first_row(parameter: nn.Parameter) -> int:
    """Where this rank's rows begin; parameters are sharded by rows, in chunks as torch.chunk cuts them."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size())
    return min(rows * mesh.get_local_rank(), parameter.shape[0])
