"""The option --device of benchmarks that run in one process."""

from __future__ import annotations

from enum import Enum

from megatron_moe_opt.errors import ConfigurationError


class Device(str, Enum):
    """The devices that a benchmark may run on."""

    cpu = "cpu"
    cuda = "cuda"


def check_device(device: Device) -> None:
    """Refuses, with ConfigurationError, a device that is not there or that the extension was not built for."""
    if device is Device.cpu:
        return
    import torch

    from megatron_moe_opt.extension import build_info

    if not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: PyTorch sees no CUDA device: use --device cpu")
    if build_info()["backend"] != "cuda":
        raise ConfigurationError(
            "--device cuda: the compiled extension has no CUDA kernels: rebuild it with nvcc on PATH, or use --device "
            "cpu"
        )
