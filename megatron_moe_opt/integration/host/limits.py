"""What Megatron cannot run without a GPU, refused by its flag: stock ends there in errors that do not name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_moe_opt.errors import ConfigurationError


class Limit(NamedTuple):
    """A feature of Megatron's that the host lacks."""

    flag: str
    is_asked: Callable[[Any], object]
    """Tells whether Megatron-LM's arguments ask for the feature."""
    needs: str


LIMITS = (
    Limit("--moe-grouped-gemm", lambda one: one.moe_grouped_gemm, "kernels of grouped GEMM"),
    Limit("--moe-permute-fusion", lambda one: one.moe_permute_fusion, "Transformer Engine"),
    Limit("--moe-latent-size", lambda one: one.moe_latent_size, "Transformer Engine"),
    Limit(
        "--recompute-modules layernorm", lambda one: "layernorm" in (one.recompute_modules or ()), "Transformer Engine"
    ),
    Limit("--multi-latent-attention", lambda one: one.multi_latent_attention, "a GPU for its rotary embedding"),
    Limit(
        "--async-save with --use-persistent-ckpt-worker",
        lambda one: one.async_save and one.use_persistent_ckpt_worker,
        "a GPU for its worker",
    ),
    Limit("--cuda-graph-impl", lambda one: one.cuda_graph_impl not in (None, "none"), "CUDA"),
)


def check_host_arguments(arguments: Any) -> None:
    """Refuses Megatron-LM's arguments, as it has parsed them, where no machine without a GPU can run them.

    Raises:
        ConfigurationError: names the flag.
    """
    for limit in LIMITS:
        try:
            is_asked = limit.is_asked(arguments)
        except AttributeError:  # an option that this version does not have
            continue
        if is_asked:
            raise ConfigurationError(
                f"{limit.flag} needs {limit.needs}, and there is no CUDA device here: drop it, or train on GPUs"
            )
