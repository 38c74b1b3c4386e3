"""Tensors of the device that wait in host memory until backward wants them, and how much of it they take."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.kernels.streams import has_streams


@dataclass
class HostMemory:
    """What all copies of this process take, in bytes."""

    used: int = 0
    peak: int = 0
    """The most that `used` was since `reset_peak`."""

    def reset_peak(self) -> None:
        """Lets `peak` begin again from what is in use now."""
        self.peak = self.used

    def _count(self, num_bytes: int) -> None:
        self.used += num_bytes
        self.peak = max(self.peak, self.used)


HOST_MEMORY = HostMemory()


class HostCopyOf:
    """The bytes of a contiguous tensor, in pinned memory where the tensor is on a GPU.

    Copies are queued on the current stream. The device tensor may be freed at once: its memory is not given to others
    before that stream has read it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
        num_bytes = host.numel() * host.element_size()
        HOST_MEMORY._count(num_bytes)
        weakref.finalize(host, HOST_MEMORY._count, -num_bytes)
        self._host = host.copy_(tensor, non_blocking=True)
        if has_streams(tensor.device):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def to_device(self, target: torch.Tensor | None = None, owner: torch.cuda.Stream | None = None) -> torch.Tensor:
        """Copies the bytes back, into `target` or a new tensor, and frees the host memory.

        Args:
            owner: on CUDA, the stream that will use a new tensor, and from whose memory it is taken; the current stream
                must wait for what that stream has queued.
        """
        if target is None:
            with nullcontext() if owner is None else torch.cuda.stream(owner):
                target = empty(self._host.shape, self._host.dtype, self._device)
        target.copy_(self._host, non_blocking=True)
        self._host = None  # PyTorch keeps pinned memory until the copies that were queued have read it
        return target
