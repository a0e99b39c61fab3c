"""Where a value is not finite. Nothing that holds one is sent, and no cell begins with one."""

from __future__ import annotations

import torch
from torch import Tensor


def first_bad(values: Tensor) -> int | None:
    """The place of the first value that is infinite or no number; None: all are finite.

    Args:
        values: of any shape; the place is counted as in ``values.flatten()``.
    """
    finite = torch.isfinite(values)
    return None if bool(finite.all()) else int((~finite.flatten()).nonzero()[0])
