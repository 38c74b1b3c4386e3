"""Tensors of devices whose work is queued on streams, where the host runs ahead of the device."""

from __future__ import annotations

import torch

from megatron_moe_opt.extension import load_extension

STREAMED = {"cuda"}
"""Types of devices whose work is queued on streams."""


def has_streams(device: torch.device) -> bool:
    """Whether work on tensors of this device is queued on streams, so that who frees, shares or reads them must say so
    to the stream or wait for it.
    """
    return device.type in STREAMED


def require(holds: torch.Tensor, what: str) -> None:
    """Refuses what does not hold, and says what it is: raises ValueError; on a device with streams, where reading the
    answer would stop the host, it is an assertion on the device.

    Args:
        holds: bool, of one element.
    """
    if has_streams(holds.device):
        torch._assert_async(holds, what)
    elif not holds:
        raise ValueError(what)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns a small tensor of the host on the device, without stopping the caller.

    From pinned memory: a copy from any other begins when all that is queued on the stream is through.
    """
    device = torch.device(device)
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, and keeps its memory as it is until what the current stream does with it from here on is
    through, where another stream has made it.
    """
    if has_streams(tensor.device):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream that nobody else has, for as long as the process lives; see csrc/pipeline/cuda_streams.h."""
    if device.type != "cuda":  # a device in software
        return torch.cuda.Stream(device)
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(load_extension().new_cuda_stream(0), device)
