"""Host memory that is reused: the first touch of fresh memory costs several times a copy into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_moe_opt.extension import load_extension

_C = load_extension()


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns an uninitialised contiguous tensor: on CPU from the pool that all our kernels' outputs come from, on
    other devices from PyTorch's caching allocator. Its memory returns to the pool when the tensor dies, on any thread.

    Raises:
        ValueError: a negative size, or more elements than any machine holds.
        MemoryError: the system has no memory left.
    """
    return _C.empty(list(shape), dtype, torch.device(device))


def stats() -> dict[str, int]:
    """Returns the pool's `used_bytes` and `cached_bytes`, and its `hits` and `misses` since the process began."""
    return _C.host_pool_stats()
