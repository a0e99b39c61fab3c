"""Stacked experts as separate matrices, for optimizers of others that take one matrix a parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islandctl.worker.optimizers.blocks import local


def of_rank(parameter: Tensor) -> str:
    """Ends the name of a state that only this rank's part of a sharded parameter has; empty where it is whole."""
    return f".rank-{parameter.device_mesh.get_local_rank()}" if isinstance(parameter, DTensor) else ""


def matrices_of(tensor: Tensor) -> list[Tensor]:
    """This rank's matrices (rows, columns) of a tensor of two or more dimensions: views. None of an empty part."""
    values = local(tensor)
    return list(values.view(-1, *values.shape[-2:]).unbind()) if values.numel() else []


class Matrices:
    """A two-dimensional parameter for each matrix that this rank holds; they share the memory of the real ones.

    Of a two-dimensional parameter that FSDP2 has sharded, this rank's rows are a matrix by themselves.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.views = {
            name: [nn.Parameter(matrix) for matrix in matrices_of(parameter)]
            for name, parameter in self.parameters.items()
        }

    def all(self) -> list[nn.Parameter]:
        """In the order of the parameters."""
        return [view for views in self.views.values() for view in views]

    def take_gradients(self) -> None:
        """Point to the present memory and gradients of the real parameters."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise ValueError(f"parameter '{name}' has no gradient")
            present = zip(self.views[name], matrices_of(parameter), matrices_of(parameter.grad), strict=True)
            for view, values, grad in present:
                view.data, view.grad = values, grad
