"""The matrix products of experts, modules that are not ours: where they lie, and when half of them have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Products:
    """A module that calls two others, of a matrix product each, one after the other with an activation between them.

    Both return their output and a bias that they have not added, or None.
    """

    module: nn.Module
    first: str
    """The name by which the module calls the first of them."""
    second: str


@dataclass
class ProductsRun:
    """How many products ran in the last call of the experts; the next one is taken to run as many.

    No module tells: experts that travel run as often as they have owners, or once for all of them.
    """

    number: int = 0


@contextmanager
def telling_halfway(products: Sequence[Products], last: ProductsRun, tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` inside the context when half of the products have run, and in the backward pass of what they compute
    there when half of theirs have. Experts whose products nobody knows tell nothing, nor does their first call.
    """
    number = 0

    def told(_: nn.Module, __: object, returned: object) -> None:
        nonlocal number
        number += 1
        if 2 * number != last.number:
            return
        tell()
        output = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(output, torch.Tensor) and output.requires_grad:
            # Of an output, not of the input of what comes next: that may be a part of what all experts get, whose
            # gradient is there when the last of them has given its own.
            output.register_hook(lambda _: tell())

    with ExitStack() as hooks:
        for one in products:
            for name in (one.first, one.second):
                hooks.enter_context(one.module._modules[name].register_forward_hook(told))
        yield
    last.number = number
