"""How long a pass of a layer takes its rank, forward and backward: its pipelines, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.observed.layer_pass import DeviceClock, HostClock, Instant

Finished = Callable[["PassClock"], None]


class PassClock:
    """Instants of one pass: made where its forward pass begins, told where its parts end.

    On CUDA they are events on the current stream, so that nothing waits for the device before `seconds` is asked for.
    """

    def __init__(self, device: torch.device, finished: Finished) -> None:
        """Args: finished: called at the end of the backward pass; never for a pass that has none."""
        self._clock = DeviceClock if has_streams(device) else HostClock
        self._finished = finished
        self._instants: list[Instant] = [self._clock.now()]

    def forward_ends(self, output: torch.Tensor, last: Any) -> None:
        """The forward pass is through.

        Args:
            output: the backward pass begins with its gradient.
            last: the autograd node with which the backward pass ends.
        """
        self._instants.append(self._clock.now())
        output.register_hook(self._backward_begins)
        last.register_hook(self._backward_ends)

    @property
    def seconds(self) -> float:
        """Of forward and backward pass together. On CUDA it waits for the device."""
        self._clock.settle()
        forward, forward_end, backward, backward_end = self._instants
        return self._clock.seconds(forward, forward_end) + self._clock.seconds(backward, backward_end)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._instants.append(self._clock.now())

    def _backward_ends(self, *_: Any) -> None:
        self._instants.append(self._clock.now())
        self._finished(self)
