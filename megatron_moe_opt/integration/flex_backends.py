"""Whether Megatron's `flex` dispatcher runs here: what moves its tokens are packages of their own, for GPUs alone."""

from __future__ import annotations

import importlib
import sys
from typing import get_args, get_type_hints

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe_opt.errors import ConfigurationError, kind_and_reason

DEEPEP, NCCL_EP = "deepep", "ncclep"
DEFAULT = DEEPEP
SUMMED = torch.bfloat16
"""The type of the rows that the kernels of its back ends sum: of others DeepEP's end in an exception, HybridEP's in an
assertion where they were built with them.
"""
SUMS_BFLOAT16 = "its kernels sum rows of bfloat16 alone"
_NEEDS = {
    DEEPEP: ("deep_ep", "Buffer", "DeepEP"),
    "hybridep": ("deep_ep", "HybridEPBuffer", "HybridEP, the hybrid-ep branch of DeepEP"),
    NCCL_EP: ("transformer_engine.pytorch.ep", "ep_bootstrap", "Transformer Engine's NCCL-EP"),
}


def flex_backends() -> tuple[str, ...]:
    """Returns the back ends that this version of Megatron-Core has a name for."""
    return get_args(get_type_hints(TransformerConfig)["moe_flex_dispatcher_backend"])


def missing_for_flex(backend: str) -> str | None:
    """Returns what keeps `flex` with this back end from running here, as the end of a sentence; None: nothing does."""
    module, name, package = _NEEDS[backend]
    if not torch.cuda.is_available():
        return f"{package} runs on GPUs alone, and PyTorch finds none"
    broken = broken_for_flex(backend)
    if broken is not None:
        return broken
    return None if hasattr(sys.modules.get(module), name) else f"{package} is not installed"


def broken_for_flex(backend: str) -> str | None:
    """Returns how a back end that is installed fails to import, as the end of a sentence; None: it does not, or is not
    there.

    A library that it was built with is gone, or there in another version: what is raised then is anything.
    """
    module, _, package = _NEEDS[backend]
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        return f"{package} is installed, but importing {module} fails with {kind_and_reason(error)}"
    return None


def check_flex(variant: str, backend: str, dtype: torch.dtype) -> None:
    """Refuses, with ConfigurationError, what a benchmark of layers of this type cannot run."""
    if backend not in flex_backends():
        raise ConfigurationError(
            f"--dispatchers {variant}: this Megatron-Core has flex on {', '.join(flex_backends())}; write one of them"
        )
    missing = missing_for_flex(backend)
    if missing is not None:
        raise ConfigurationError(f"--dispatchers {variant}: {missing}: leave it out here")
    if dtype != SUMMED:
        raise ConfigurationError(f"--dispatchers {variant}: {SUMS_BFLOAT16}: add --dtype bf16")
