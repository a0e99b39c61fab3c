"""Error feedback: what the codec leaves out of one packet goes with the next. Same bits on every processor."""

from __future__ import annotations

import torch
from torch import Tensor


def owed(delta: Tensor, residual: Tensor, beta: float) -> Tensor:
    """v = d + β·e: what is to be sent, of what was learnt (``delta``) and what earlier packets have left out."""
    return residual.mul(beta).add_(delta)


def left_out(vector: Tensor, sent: Tensor) -> Tensor:
    """The new residual v − C(v), with ``sent`` = C(v) as every reader decodes it."""
    return torch.sub(vector, sent)
