"""Optional libraries that Megatron assumes once a code path is reached: Transformer Engine and the compiler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.integration.patching import replace


def _version_zero(get_te_version: Callable[[], Any]) -> Callable[[], Any]:
    """Adapts get_te_version to answer version 0 for an absent library, which is older than any: Megatron's version
    checks would compare None.
    """
    version = importlib.import_module("packaging.version").Version

    def get() -> Any:
        return get_te_version() or version("0")

    return get


def _as_written(_: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what stands for `torch.compile`: it gives back what it is given, or a decorator that does."""

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    return compile_nothing


def use_eager() -> None:
    """Run `torch.compile`d functions as they are written, those decorated before this call included.

    Megatron compiles small fusions (bias + activation, rotary embedding) that on the CPU cost far more to compile than
    they save. The compiler itself takes longer to import than Megatron, and so is imported for none of them.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    replace(torch, "compile", _as_written)


def use_absent_libraries() -> None:
    """Let Megatron see that Transformer Engine is not there, where it fails to look."""
    replace(importlib.import_module("megatron.core.utils"), "get_te_version", _version_zero)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 asks `te_general_gemm is not None` in the router but defines it only where the import succeeds.
        moe_utils.te_general_gemm = None
    # --delay-wgrad-compute calls `backward_dw` of all linear layers. Those without Transformer Engine have their weight
    # gradients by then; Megatron says so for the one that is cut by columns, and forgets the one that is cut by rows.
    row_parallel = importlib.import_module("megatron.core.tensor_parallel.layers").RowParallelLinear
    if not hasattr(row_parallel, "backward_dw"):
        row_parallel.backward_dw = lambda self: None
