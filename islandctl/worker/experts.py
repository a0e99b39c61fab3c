"""The mixture of experts: routing, grouped products, balance.

Shapes as in ``model.py``; M rows are assignments of a token to an expert, sorted by expert.

Source: Fedus et al., Switch Transformers, 2021 (balance loss: eq. 4 to 6), with the gates of the A chosen experts
normalised to 1 as in Mixtral (Jiang et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from islandctl.config.recipe import ModelRecipe

ALIGNMENT = 8
"""Rows of a group for torch's grouped kernel: 16 bytes of bfloat16."""


class _Take(torch.autograd.Function):
    """Rows in another order. Its backward is a plain gather: exact and fast, where indexing's would add up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        if index.numel() > rows.shape[0]:
            rows = F.pad(rows, (0, 0, 0, 1))
        return rows[index]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, back = ctx.saved_tensors
        return take(grads[0], back, index), None, None


def take(rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """``rows[index]``, where ``back`` leads back. An index of ``len(rows)`` gives a row of zeros."""
    return cast(Tensor, _Take.apply(rows, index, back))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Layout:
    """How assignments lie in memory, sorted by expert."""

    source_M: Tensor
    """For each row its assignment (token · A + place), or the number of assignments: a row of padding."""
    row: Tensor
    """For each assignment its row."""
    counts_E: Tensor
    """Rows of each expert, padding included."""

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, *, padded: bool) -> Layout:
        """From each assignment's expert.

        Args:
            padded: every expert's rows are a multiple of ``ALIGNMENT``, and their total does not depend on the
                routing, so that nothing has to wait for the counts.
        """
        total = chosen.numel()
        order = chosen.argsort(stable=True)
        place = torch.arange(total, device=chosen.device)
        counts_E = torch.bincount(chosen, minlength=num_experts)
        if not padded:
            return cls(order, torch.empty_like(order).scatter_(0, order, place), counts_E)
        rounded_E = (counts_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        size = (total + num_experts * ALIGNMENT) // ALIGNMENT * ALIGNMENT
        shift_E = (rounded_E.cumsum(0) - rounded_E) - (counts_E.cumsum(0) - counts_E)
        rows = place + shift_E[chosen[order]]
        rounded_E[-1] += size - rounded_E.sum()
        source_M = torch.full((size,), total, device=chosen.device).scatter_(0, rows, order)
        return cls(source_M, torch.empty_like(order).scatter_(0, order, rows), rounded_E)


def grouped_linear(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor, *, fused: bool) -> Tensor:
    """Rows sorted by expert, times their expert's matrix.

    Args:
        fused: torch's grouped kernel. Otherwise one product an expert, which is the faster way on a processor.
    """
    if fused:
        dtype = torch.bfloat16 if x_MD.is_cuda else x_MD.dtype
        return F.grouped_mm(x_MD.to(dtype), weight_EDF.to(dtype), offs=counts_E.cumsum(0).to(torch.int32))
    parts = zip(torch.split(x_MD, counts_E.tolist()), weight_EDF.unbind(0), strict=True)
    return torch.cat([rows @ weight_DF for rows, weight_DF in parts])


class Experts(nn.Module):
    """A mixture of SwiGLU experts. Every token goes to its A most probable experts; none is dropped."""

    def __init__(self, recipe: ModelRecipe) -> None:
        super().__init__()
        if recipe.experts is None or recipe.active_experts is None:
            raise ValueError("a mixture needs experts and active_experts")
        self.active = recipe.active_experts
        self.router = nn.Linear(recipe.width, recipe.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(recipe.experts, recipe.width, recipe.hidden))
        self.up = nn.Parameter(torch.empty(recipe.experts, recipe.width, recipe.hidden))
        self.down = nn.Parameter(torch.empty(recipe.experts, recipe.hidden, recipe.width))
        self.alignable = recipe.width % ALIGNMENT == 0 and recipe.hidden % ALIGNMENT == 0

    def fused(self, device: torch.device) -> bool:
        """Whether torch's grouped kernel fits: on a GPU, in bfloat16, with aligned widths."""
        return device.type == "cuda" and torch.is_autocast_enabled("cuda") and self.alignable

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(B, S, D) to (B, S, D), and the block's routing: assignments and summed probabilities, each (E,)."""
        x_ND = x_BSD.flatten(0, 1)
        with torch.autocast(x_ND.device.type, enabled=False):  # rounding here would flip the choice of experts
            probs_NE = self.router(x_ND.float()).softmax(dim=-1)
        chosen_NA = probs_NE.detach().topk(self.active, dim=-1).indices
        gates_NA = probs_NE.gather(-1, chosen_NA)  # unlike topk's own, gather's backward is deterministic on GPUs
        gates_NA = gates_NA / gates_NA.sum(dim=-1, keepdim=True)

        fused = self.fused(x_ND.device)
        layout = Layout.of(chosen_NA.flatten(), probs_NE.shape[1], padded=fused)
        y_NAD = self.mix(x_ND, layout, fused=fused)
        y_ND = (y_NAD * gates_NA.unsqueeze(-1).to(y_NAD.dtype)).sum(dim=1)
        counts_E = torch.bincount(chosen_NA.flatten(), minlength=probs_NE.shape[1])
        return y_ND.view_as(x_BSD).to(x_BSD.dtype), (counts_E.float(), probs_NE.sum(dim=0))

    def mix(self, x_ND: Tensor, layout: Layout, *, fused: bool) -> Tensor:
        """What each of a token's experts makes of it: (N, A, D)."""
        copies = x_ND.unsqueeze(1).expand(-1, self.active, -1).reshape(-1, x_ND.shape[1])
        x_MD = take(copies, layout.source_M, layout.row)
        hidden_MF = F.silu(grouped_linear(x_MD, self.gate, layout.counts_E, fused=fused))
        hidden_MF = hidden_MF * grouped_linear(x_MD, self.up, layout.counts_E, fused=fused)
        y_MD = grouped_linear(hidden_MF, self.down, layout.counts_E, fused=fused)
        return take(y_MD, layout.row, layout.source_M).view(x_ND.shape[0], self.active, -1)


def balance_loss(counts_LE: Tensor, probs_LE: Tensor, num_tokens: float) -> Tensor:
    """E · Σₑ fₑPₑ, summed over the blocks: 1 a block when the experts are used evenly, up to E when not.

    Args:
        counts_LE: assignments to each expert.
        probs_LE: summed probabilities.
        num_tokens: tokens that ``probs_LE`` sums over.
    """
    if counts_LE.numel() == 0:
        return probs_LE.sum()
    share_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True)
    return counts_LE.shape[1] * (share_LE * probs_LE).sum() / num_tokens
