"""The kernels on a CUDA device: a GPU, or the emulator of tests/emulator, which is a thousand times slower."""

from __future__ import annotations

from typing import TypeVar

from megatron_moe_opt.extension import build_info

T = TypeVar("T")
EMULATED = build_info()["compiler"] == "emulator"


def sized(on_a_gpu: T, emulated: T) -> T:
    """The size for the device at hand."""
    return emulated if EMULATED else on_a_gpu
