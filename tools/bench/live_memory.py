"""What a piece of code holds on the device while it runs, and at its highest point."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe_opt.kernels import host_pool


class DeviceMemory(Protocol):
    """Bytes that are held on a device above those at the start."""

    @property
    def held(self) -> int:
        """Returns the bytes that are held now."""

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""


@contextmanager
def device_memory(device: torch.device) -> Iterator[DeviceMemory]:
    """Counts inside the block: on CUDA PyTorch's allocated bytes; on a CPU see `LiveTensors`."""
    if device.type == "cuda":
        yield _CudaMemory(device)
    else:
        with LiveTensors() as live:
            yield live


class _CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    @property
    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class LiveTensors(TorchDispatchMode):
    """Counts the memory of tensors on a CPU that were made inside the context and are still alive.

    It sees every tensor that an operator of PyTorch makes in this thread, autograd's backward pass included, and all
    memory of our kernels' pool, whichever thread takes it. What an operator uses inside itself is not seen, nor what
    other threads make: copies to host memory (runtime/engine/offload.py) are made in a lane's thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_tensors = self._peak = 0
        self._known: set[int] = set()  # addresses of the storages counted
        self._pool_before = host_pool.stats()["used_bytes"]

    @property
    def held(self) -> int:
        """Bytes that are held now, above those at the start."""
        return self._of_tensors + host_pool.stats()["used_bytes"] - self._pool_before

    @property
    def peak(self) -> int:
        """The most bytes that were held after any operator."""
        return max(self._peak, self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._peak = self.peak  # of our pool too, before the operator
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._see(leaf, given)
        self._peak = self.peak
        return result

    def _see(self, tensor: torch.Tensor, given: set[int]) -> None:
        """Counts new memory: not a view of what the operator was given."""
        address, storage = _address(tensor), tensor.untyped_storage()
        if address and address not in given and address not in self._known:
            self._known.add(address)
            self._of_tensors += storage.nbytes()
            weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self._of_tensors -= num_bytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
