"""A tiny mixture-of-experts decoder for C cells at once: every parameter has the cell as its first dimension.

Shapes are written behind a tensor's name:

    C cells   B sequences   S positions   N = B·S tokens   D width   V vocabulary
    E experts   A active experts of a token   F hidden width

The architecture is the worker's (RMSNorm, SwiGLU, top-A routing with gates normalised to 1) with learned positions.
No value of one cell ever meets a value of another, so a stack trains exactly like its cells by themselves.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.experiments.equal_compute_lib.settings import Model

NUM_BYTES = 256
Values = dict[str, Tensor]


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape in one cell; inputs before outputs."""
    D, E, H = model.width, model.experts, model.hidden
    found: dict[str, tuple[int, ...]] = {"embedding.bytes": (NUM_BYTES, D), "embedding.places": (model.sequence, D)}
    for layer in range(model.layers):
        found |= {
            f"blocks.{layer}.attention_norm": (D,),
            f"blocks.{layer}.attention.qkv": (D, 3 * D),
            f"blocks.{layer}.attention.o": (D, D),
            f"blocks.{layer}.ffn_norm": (D,),
            f"blocks.{layer}.ffn.router": (D, E),
            f"blocks.{layer}.ffn.gate_up": (E, D, 2 * H),
            f"blocks.{layer}.ffn.down": (E, H, D),
        }
    return found | {"norm": (D,), "head": (D, NUM_BYTES)}


def initial(model: Model, seed: int) -> Values:
    """One cell's first values, (1, *shape) each."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in shapes(model).items():
        if len(shape) == 1:
            values[name] = torch.ones(1, *shape)
            continue
        fan_in = shape[-1] if name.startswith("embedding") else shape[-2]
        scale = 1 / math.sqrt(2 * model.layers) if name.endswith((".o", ".down")) else 1.0
        values[name] = torch.randn(1, *shape, generator=generator) * (scale / math.sqrt(fan_in))
    return values


class _Take(torch.autograd.Function):
    """Rows in another order; its backward is a gather too, where indexing's own would add up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, back = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


def _take(rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
    return cast(Tensor, _Take.apply(rows, index, back))  # type: ignore[no-untyped-call]


def _norm(x_CND: Tensor, weight_CD: Tensor) -> Tensor:
    return F.rms_norm(x_CND, (x_CND.shape[-1],), None, 1e-6) * weight_CD.unsqueeze(1)


def _attend(model: Model, values: Values, layer: int, x_CND: Tensor) -> Tensor:
    C, N, D = x_CND.shape
    heads, S = model.heads, model.sequence
    qkv = torch.bmm(x_CND, values[f"blocks.{layer}.attention.qkv"]).view(C * N // S, S, 3, heads, D // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.bmm(y.transpose(1, 2).reshape(C, N, D), values[f"blocks.{layer}.attention.o"])


def _each(rows: Tensor, weight_CEDF: Tensor, sizes: list[int]) -> Tensor:
    """Every expert's matrix on its own rows."""
    parts = zip(torch.split(rows, sizes), weight_CEDF.flatten(0, 1).unbind(0), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


class _Head(torch.autograd.Function):
    """Each cell's mean cross-entropy behind the head, with its gradients, in pieces that stay in the cache."""

    PIECE = 1024

    @staticmethod
    def forward(ctx: Any, x_CND: Tensor, head_CDV: Tensor, target_CN: Tensor, learns: bool) -> Tensor:
        C, N, _ = x_CND.shape
        grad_CND, grad_CDV = (torch.zeros_like(x_CND), torch.zeros_like(head_CDV)) if learns else (x_CND, head_CDV)
        nats_C = torch.zeros(C)
        for cell in range(C):
            head_DV = head_CDV[cell]
            for start in range(0, N, _Head.PIECE):
                part = slice(start, start + _Head.PIECE)
                x_ND, target_N1 = x_CND[cell, part], target_CN[cell, part].unsqueeze(1)
                scores_NV = x_ND @ head_DV
                scores_NV -= scores_NV.amax(1, keepdim=True)
                true_N1 = scores_NV.gather(1, target_N1)
                sum_N1 = scores_NV.exp_().sum(1, keepdim=True)
                nats_C[cell] += (sum_N1.log() - true_N1).sum()
                if learns:
                    scores_NV.div_(sum_N1 * N)
                    scores_NV.scatter_add_(1, target_N1, torch.full_like(true_N1, -1 / N))
                    torch.mm(scores_NV, head_DV.t(), out=grad_CND[cell, part])
                    grad_CDV[cell].addmm_(x_ND.t(), scores_NV)
        ctx.save_for_backward(grad_CND, grad_CDV)
        return nats_C / N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_CND, grad_CDV = ctx.saved_tensors
        scale_C11 = grads[0].view(-1, 1, 1)
        return grad_CND * scale_C11, grad_CDV * scale_C11, None, None


def _mix(model: Model, values: Values, layer: int, x_CND: Tensor) -> tuple[Tensor, Tensor]:
    """The mixture of experts: (C, N, D), and each cell's balance loss (Switch Transformers, eq. 4), (C,)."""
    C, N, D = x_CND.shape
    E, A = model.experts, model.active
    scores_CNE = torch.bmm(x_CND, values[f"blocks.{layer}.ffn.router"])
    probs_CNE = (
        scores_CNE.transpose(1, 2).contiguous().softmax(1).transpose(1, 2)
    )  # 7 times as fast as along 8 values
    chosen_CNA = probs_CNE.detach().topk(A, dim=-1).indices
    gates_CNA = probs_CNE.gather(-1, chosen_CNA)
    gates_CNA = gates_CNA / gates_CNA.sum(-1, keepdim=True)

    groups = (chosen_CNA + torch.arange(C).view(C, 1, 1) * E).view(-1)
    order = groups.to(torch.int16).argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = torch.bincount(groups, minlength=C * E)
    sizes = counts.tolist()
    rows = _take(x_CND.unsqueeze(2).expand(C, N, A, D).reshape(-1, D), order, back)
    gate_weight, up_weight = values[f"blocks.{layer}.ffn.gate_up"].chunk(2, dim=-1)
    gate, up = _each(rows, gate_weight, sizes), _each(rows, up_weight, sizes)
    hidden = F.silu(gate) * up * _take(gates_CNA.view(-1, 1), order, back)
    rows = _each(hidden, values[f"blocks.{layer}.ffn.down"], sizes)
    y_CND = _take(rows, back, order).view(C, N, A, D).sum(2)

    share_CE = counts.view(C, E).float() / (N * A)
    return y_CND, E * (share_CE * probs_CNE.mean(1)).sum(-1)


def losses(model: Model, values: Values, text_CBS: Tensor) -> tuple[Tensor, Tensor]:
    """Each cell's cross-entropy in nats per byte and its balance loss, (C,) both.

    Args:
        text_CBS: (C, B, sequence + 1) int64; the last byte is only predicted.
    """
    C, B, _ = text_CBS.shape
    S, D = model.sequence, model.width
    offset = (torch.arange(C) * NUM_BYTES).view(C, 1, 1)
    x = F.embedding(text_CBS[..., :-1] + offset, values["embedding.bytes"].flatten(0, 1))
    x_CND = (x + values["embedding.places"].unsqueeze(1)).view(C, B * S, D)
    balance_C = torch.zeros(C)
    for layer in range(model.layers):
        x_CND = x_CND + _attend(model, values, layer, _norm(x_CND, values[f"blocks.{layer}.attention_norm"]))
        y_CND, part_C = _mix(model, values, layer, _norm(x_CND, values[f"blocks.{layer}.ffn_norm"]))
        x_CND, balance_C = x_CND + y_CND, balance_C + part_C
    target_CN = text_CBS[..., 1:].reshape(C, -1)
    x_CND = _norm(x_CND, values["norm"])
    nats_C = _Head.apply(x_CND, values["head"], target_CN, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return cast(Tensor, nats_C), balance_C


@torch.no_grad()
def bits_per_byte(model: Model, values: Values, text_BS: Tensor, *, batch: int = 256) -> list[float]:
    """Each cell's bits per byte on the same held-out sequences."""
    cells = next(iter(values.values())).shape[0]
    total_C = torch.zeros(cells, dtype=torch.float64)
    for part in torch.split(text_BS, max(1, batch // cells)):
        nats_C, _ = losses(model, values, part.expand(cells, *part.shape))
        total_C += nats_C.double() * len(part)
    return [float(x) for x in total_C / len(text_BS) / math.log(2)]
