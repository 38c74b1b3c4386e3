"""What `megatron.training` (a Megatron-LM checkout's training loop) needs beyond Megatron-Core.

These modules are adapted when a script imports them; nothing of megatron.training is imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron_moe_opt.integration.host.limits import check_host_arguments
from megatron_moe_opt.integration.patching import around_import, replace, when_imported
from megatron_moe_opt.integration.training_arguments import before_validation


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts initialize_megatron to run without CUDA: the training loop asserts a device unless told otherwise."""

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


def _no_fused_kernels(original: Callable[..., None]) -> Callable[..., None]:
    """Replaces a step that would compile CUDA softmax kernels with nvcc at start; the torch softmax is used."""
    del original
    return lambda args: None


class _Absent:
    """Stands for a library whose decorators and annotations are evaluated but whose functions are never called."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self


@contextmanager
def _without_triton(module: ModuleType) -> Iterator[None]:
    """Has triton read as present in the block: 0.16 imports `batch_invariant_kernels` at start whether the mode is on
    or not, and that imports triton.

    Only while the module's code runs does triton read as present: elsewhere Megatron rightly sees that it is not.
    """
    del module
    stand_ins = {name: _Absent() for name in ("triton", "triton.language")}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def use_host_training() -> None:
    """Adapt megatron.training and what it starts with, where a script uses them."""
    # Required by the argument check for overlap on GPUs before Blackwell; no CUDA device reads it here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    before_validation(check_host_arguments)
    when_imported("megatron.training.initialize", lambda module: replace(module, "initialize_megatron", _allow_no_cuda))
    when_imported("megatron.legacy.fused_kernels", lambda module: replace(module, "load", _no_fused_kernels))
    if importlib.util.find_spec("triton") is None:
        around_import("megatron.core.transformer.custom_layers.batch_invariant_kernels", _without_triton)
