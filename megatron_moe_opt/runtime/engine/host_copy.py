"""A small device tensor on its way to the host."""

from __future__ import annotations

import torch

from megatron_moe_opt.kernels.streams import has_streams


class HostCopy:
    """Copies `tensor` to the host without stopping the caller; `wait()` returns the host tensor.

    The copy is ordered behind the work already queued on the current stream and ahead of what is queued later, so that
    waiting for it does not wait for later kernels. A CPU tensor is its own copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if has_streams(tensor.device):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = tensor

    def wait(self) -> torch.Tensor:
        """Waits for the copy, and returns the tensor on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
