"""Rows on the wire between two steps of a pass, kept from autograd.

Rows and their gradients have formats of their own on the wire, so that tensors of them differ in width and dtype, which
autograd does not allow, and gradients of bytes it has none. What it sees is an empty tensor that stands for the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels.streams import used_here


@dataclass
class WireRows:
    """The rows of one pass on the wire, and later their gradients. Who takes either has it alone, on any stream: under
    1F1B overlap a stage frees what the one before it has made.
    """

    rows: torch.Tensor | None = None
    gradients: torch.Tensor | None = None

    def take_rows(self) -> torch.Tensor:
        """Returns the rows, and keeps no reference to them."""
        rows, self.rows = self.rows, None
        return used_here(rows)

    def take_gradients(self) -> torch.Tensor:
        """Returns the gradients of the rows, and keeps no reference to them."""
        gradients, self.gradients = self.gradients, None
        return used_here(gradients)


def onto_wire(
    wire: WireRows,
    there: Callable[..., torch.Tensor],
    back: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """Puts there(*tensors) on the wire and returns what stands for it; `back` takes gradients of the rows to those of
    the tensors. Differentiable once.
    """
    return _Onto.apply(wire, there, back, *tensors)


def off_wire(
    stand_in: torch.Tensor, wire: WireRows, there: Callable[[torch.Tensor], Any], back: Callable[..., torch.Tensor]
) -> Any:
    """Returns there(rows), a tensor or several, of what `onto_wire` has put on the wire; `back` takes their gradients
    to those of the rows. Differentiable once.
    """
    return _Off.apply(stand_in, wire, there, back)


class _Onto(Function):
    @staticmethod
    def forward(ctx: Any, wire: WireRows, there: Any, back: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.wire, ctx.back = wire, back
        wire.rows = there(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.back(ctx.wire.take_gradients())


class _Off(Function):
    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, wire: WireRows, there: Any, back: Any) -> Any:
        ctx.wire, ctx.back = wire, back
        return there(wire.take_rows())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A gradient that another pipeline stage has sent requires one: lanes, which are threads, would record a graph.
        ctx.wire.gradients = ctx.back(*(one.detach().contiguous() for one in gradients))
        return gradients[0].new_empty(0), None, None, None
