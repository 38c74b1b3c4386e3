"""A graph of its own, whose backward pass runs when its owner says.

It begins at an empty tensor and ends in another, so that it holds on to neither what it takes nor what it returns:
gradients come and go beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class Gradients:
    """Gradients of a graph: handed to its end, and taken from its beginning."""

    output: torch.Tensor | None = None
    sources: tuple[torch.Tensor | None, ...] = ()
    """The gradients of what the graph has taken; None: of what has none."""


class Enter(Function):
    """Begins a graph at `anchor`, an empty tensor that requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, gradients: Gradients, *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the sources, as tensors of the graph."""
        ctx.gradients, ctx.device = gradients, anchor.device
        ctx.set_materialize_grads(False)
        return tuple(source.detach() for source in sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Leaves the sources' gradients in `gradients.sources`."""
        ctx.gradients.sources = grads
        return torch.empty(0, device=ctx.device), None, *(None for _ in grads)


class Leave(Function):
    """Ends a graph in an empty tensor. The gradient of the output comes in `gradients.output`."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        """Returns the end of the graph."""
        ctx.gradients = gradients
        return torch.empty(0, dtype=output.dtype, device=output.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient of the output, which nobody holds any longer then."""
        grad_output, ctx.gradients.output = ctx.gradients.output, None
        return grad_output, None
