"""Where the host runs ahead of the device."""

from __future__ import annotations

import torch

STREAMED = {"cuda"}
"""Types of devices whose work is queued on streams."""


def has_streams(device: torch.device) -> bool:
    """Whether work on tensors of this device is queued on streams, so that who frees, shares or reads them must say so
    to the stream or wait for it.
    """
    return device.type in STREAMED
