"""Inner optimizers beyond torch's own: Shampoo, and matrix optimizers of others over stacked experts."""

from islandctl.worker.optimizers.groups import is_matrix, param_groups
from islandctl.worker.optimizers.shampoo import Shampoo

__all__ = ["Shampoo", "is_matrix", "param_groups"]
