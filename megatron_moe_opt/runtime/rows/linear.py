"""Linear maps of rows, which autograd can differentiate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Map = Callable[[torch.Tensor], torch.Tensor]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def linear(rows: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
    """Returns there(rows); `back` takes the gradient of the result to that of the rows. Differentiable once."""
    return _Linear.apply(rows, there, back)
