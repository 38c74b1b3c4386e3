"""The matrix products of experts, modules that are not ours: where they lie, and when half of them have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def telling_halfway(products: Sequence[Products], tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` inside the context when half of the products have run, and in the backward pass of what they compute
    there when half of theirs have. Experts whose products nobody knows tell nothing.

    Args:
        products: in the order in which they run.
    """
    modules = [one.module._modules[name] for one in products for name in (one.first, one.second)]
    if not modules:
        yield
        return

    def told(_: nn.Module, __: object, returned: object) -> None:
        tell()
        output = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(output, torch.Tensor) and output.requires_grad:
            # Of an output, not of the input of what comes next: that may be a part of what all experts get, whose
            # gradient is there when the last of them has given its own.
            output.register_hook(lambda _: tell())

    handle = modules[len(modules) // 2 - 1].register_forward_hook(told)
    try:
        yield
    finally:
        handle.remove()
