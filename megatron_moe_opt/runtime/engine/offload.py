"""Tensors of the device that wait in host memory until they are wanted again, and how much of it they take."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.kernels.streams import has_streams


@dataclass
class HostMemory:
    """Counts the bytes on the host that all copies of this process take."""

    used: int = 0
    peak: int = 0
    """The most that `used` was since `reset_peak`."""
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def reset_peak(self) -> None:
        """Lets `peak` begin again from what is in use now."""
        self.peak = self.used

    def _count(self, num_bytes: int) -> None:
        with self._lock:  # lanes are threads, and what is freed may be freed in any of them, and in the midst of this
            self.used += num_bytes
            self.peak = max(self.peak, self.used)


HOST_MEMORY = HostMemory()


class OffloadedTensor:
    """A copy on the host of a contiguous tensor's bytes, in pinned memory where the tensor is on a GPU.

    Copies are queued on the current stream. The device tensor stays the caller's, who frees it when its own stream has
    waited for this one, or tells the allocator (kernels.streams.used_here).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
        num_bytes = _bytes_taken(host)
        HOST_MEMORY._count(num_bytes)
        weakref.finalize(host, HOST_MEMORY._count, -num_bytes)
        self._host = host.copy_(tensor, non_blocking=True)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes can take the place of these."""
        return (tensor.shape, tensor.dtype, tensor.device) == (self._host.shape, self._host.dtype, self._device)

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Keeps the bytes of a tensor that fits in the place of these."""
        self._host.copy_(tensor, non_blocking=True)

    def room(self) -> torch.Tensor:
        """Returns a tensor on the device, of the current stream's memory, that the bytes fit into."""
        return empty(self._host.shape, self._host.dtype, self._device)

    def on_device(self) -> torch.Tensor:
        """Returns a new tensor with the bytes; the host keeps them."""
        return self.room().copy_(self._host, non_blocking=True)

    def to_device(self, target: torch.Tensor) -> None:
        """Copies the bytes back, and frees the host memory."""
        target.copy_(self._host, non_blocking=True)
        self._host = None  # PyTorch keeps pinned memory until the copies that were queued have read it


def _bytes_taken(host: torch.Tensor) -> int:
    """Returns the bytes of the host that a new tensor takes: PyTorch rounds pinned ones up to a power of two."""
    return 1 << (host.nbytes - 1).bit_length() if host.is_pinned() else host.nbytes


class Kept:
    """A tensor that is kept from one use to the next, on its device or, to spare memory there, on the host.

    It is put and got on one stream. What is put from another one's memory was said to be used here.
    """

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host
        self._kept: torch.Tensor | OffloadedTensor | None = None

    def __bool__(self) -> bool:
        return self._kept is not None

    def put(self, tensor: torch.Tensor) -> None:
        """Keeps a contiguous tensor, in the place of what was kept before; from the host it can be got as it is now."""
        if not self.on_host:
            self._kept = tensor
        elif self._kept is not None and self._kept.fits(tensor):
            self._kept.overwrite(tensor)  # PyTorch cannot reuse pinned memory before its copies are done
        else:
            self._kept = OffloadedTensor(tensor)

    def get(self) -> torch.Tensor:
        """Returns the tensor; from the host a new one, so that whoever changes it must put it again."""
        return self._kept.on_device() if self.on_host else self._kept
