"""Megatron-Core on a host without a GPU: models, data, optimizer and checkpoints on CPU over Gloo.

`use_host_backend()` is the only function to call. Each module here adapts one part of PyTorch or Megatron and says
why at each adaptation; `patching` refuses, by name, where upstream has moved what is adapted.
"""

from __future__ import annotations

import torch

_in_use = False


def use_host_backend() -> bool:
    """Make Megatron-Core run on CPU over Gloo in this process.

    Call it before torch.distributed is initialized; whether Megatron is imported before or after does not matter.
    A second call does nothing. On a machine with a CUDA device nothing is changed at all.

    Returns:
        True where Megatron now runs on the host, False where there is a CUDA device.

    Raises:
        ConfigurationError: a name that has to be adapted is not where this version of PyTorch or Megatron had it.
    """
    global _in_use
    if _in_use:
        return True
    if torch.cuda.is_available():
        return False
    # Here and not above: importing this package must not import Megatron or torch.distributed's modules.
    from megatron_moe_opt.integration.host import (
        attention,
        devices,
        gloo,
        libraries,
        norm,
        optimizer,
        rng,
        training,
    )

    devices.use_host_devices()
    gloo.use_host_collectives()
    libraries.use_eager()
    # From here on Megatron is imported, onto the adapted torch.
    rng.use_host_generator()
    libraries.use_absent_libraries()
    norm.use_torch_norm()
    attention.use_host_attention()
    optimizer.use_torch_adam()
    training.use_host_training()
    _in_use = True
    return True
