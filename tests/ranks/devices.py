"""Where a rank's tensors are: on the host, or with `pytest --gpus` on a GPU.

Tests do not name a device. What they make with torch's factories is drawn on the host, from the same random numbers
with and without GPUs, and lies on the rank's device; what the package and Megatron make is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.gpu_settings import SHARED
from megatron_moe_opt.runtime.job.gpu_of_rank import take_gpu
from tests.ranks.pool import EMULATOR, GPUS

CONTRACT = 1e-6
"""The largest difference of fp32 results whose sums are taken in another order: norm of the
difference over the norm.
"""


def on_gpus() -> bool:
    """Whether the ranks are on GPUs."""
    return GPUS in os.environ


def rank_device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def difference(ours: torch.Tensor, stock: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    ours, stock = ours.double(), stock.double()
    return ((ours - stock).norm() / stock.norm().clamp_min(1e-30)).item()


def same(ours: torch.Tensor, stock: torch.Tensor) -> bool:
    """Whether two computations have one result: bit for bit on the host; to the contract's rounding on a GPU, where
    the order in which a matrix product sums depends on the number of its rows.
    """
    if on_gpus() and ours.is_floating_point():
        return ours.shape == stock.shape and difference(ours, stock) < CONTRACT
    return torch.equal(ours, stock)


def use_gpu() -> None:
    """Makes this process that of a rank with a GPU, before its process group is made."""
    if EMULATOR in os.environ:
        from tests.emulator.ranks import use_emulated_gpu

        use_emulated_gpu()
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ[SHARED] = "1"
    take_gpu()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # of Transformer Engine's products, which do not ask PyTorch
    # Repeated runs have the same bits. What cannot is said, and stays within the contract.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)

    # What Megatron wants of Transformer Engine and Apex for a whole model, whether they are installed or not.
    from megatron_moe_opt.integration.host import attention, devices, libraries, norm, optimizer

    libraries.use_absent_libraries()
    norm.use_torch_norm()
    attention.use_host_attention()
    optimizer.use_torch_adam()
    for name in (*devices.FACTORIES, "from_numpy"):
        setattr(torch, name, _on_device(getattr(torch, name)))


def _on_device(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the factory, with its tensors moved to the rank's device where a test has made
    them and named no device.
    """

    def make(*arguments: Any, **named: Any) -> Any:
        made = factory(*arguments, **named)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if not asked_by.startswith("tests.") or named.get("device") is not None:
            return made
        return made.to(rank_device()).detach().requires_grad_(made.requires_grad)

    return make
