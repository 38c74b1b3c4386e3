"""Megatron's other dispatchers, `allgather` and `flex`, which `auto` tries beside `alltoall` without a model."""

from __future__ import annotations

import copy
import importlib
import itertools
import types
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.errors import kind_and_reason
from megatron_moe_opt.integration.layer.overlapped_batches import overlaps_batches
from megatron_moe_opt.integration.layer.replicated_tokens import NOT_UNDER_STOCK, holds_replicated_tokens
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Refusal
from megatron_moe_opt.runtime.job.job_store import job_store
from megatron_moe_opt.systems.megatron_config import quantization
from megatron_moe_opt.variants import FLEX

ALLGATHER = "allgather"
ALIKE_S = 30.0
"""How long a rank that cannot start what all start together waits to hear that no other could or does."""
_starts = itertools.count()
_GATHERED = 2
"""How often a pass of `allgather` holds what all ranks' tokens take: as they arrive, and as they are summed."""


def is_stock_variant(variant: str) -> bool:
    """Whether the variant is one of those that are tried without a prediction."""
    return variant.partition(":")[0] in (ALLGATHER, FLEX)


def stock_variants(
    config: Any, layers: Sequence[LayerWorkload], tokens: tuple[int, int], spare: int | None
) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Returns the ones of them that this configuration can run on this machine; and those that it cannot, of what is
    installed.

    Args:
        layers: that they would run in.
        tokens: the fewest and the most of a pass on any rank.
        spare: bytes of the fullest GPU that a pass may take besides what stock's did; None: not known.
    """
    from megatron_moe_opt.integration.flex_backends import NCCL_EP, broken_for_flex, flex_backends, missing_for_flex

    # NCCL-EP is made once in a process, for as many tokens as its first pass has.
    backends = [one for one in flex_backends() if one != NCCL_EP]
    variants = [ALLGATHER, *(f"{FLEX}:{one}" for one in backends if missing_for_flex(one) is None)]
    reasons = [
        (
            variant,
            stock_refusal(config, variant) or _unlike(config, variant, *tokens) or _too_large(variant, layers, spare),
        )
        for variant in variants
    ]
    reasons += [(f"{FLEX}:{one}", broken) for one in backends if (broken := broken_for_flex(one)) is not None]
    refused = tuple(Refusal(variant, reason) for variant, reason in reasons if reason is not None)
    return tuple(variant for variant, reason in reasons if reason is None), refused


def stock_dispatcher(layer: Any, variant: str) -> Any:
    """Returns the dispatcher that MoELayer would have built under this name.

    Args:
        layer: a MoELayer, with stock's `alltoall` dispatcher or any of ours.
    """
    from megatron.core.transformer.moe import token_dispatcher as stock

    built = layer.token_dispatcher
    named = {ALLGATHER: stock.MoEAllGatherTokenDispatcher, FLEX: stock.MoEFlexTokenDispatcher}
    groups = types.SimpleNamespace(ep=built.ep_group, expt_tp=built.tp_group, tp_ep=built.tp_ep_group)
    dispatcher = named[variant.partition(":")[0]](
        layer.num_local_experts,
        layer.local_expert_indices,
        config=_named(layer.config, variant),
        pg_collection=groups,
    )
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        dispatcher.set_shared_experts(layer.shared_experts)
    return dispatcher


def missing_package(variant: str) -> str | None:
    """Returns what this rank lacks for the variant, as the end of a sentence; None: nothing. Another may lack it."""
    from megatron_moe_opt.integration.flex_backends import missing_for_flex

    name, _, backend = variant.partition(":")
    return missing_for_flex(backend) if name == FLEX else None


def failure_to_start(variant: str, layers: Sequence[Any]) -> str | None:
    """Returns what keeps the variant from running on this rank, found by making what it communicates with; None:
    nothing.

    Of DeepEP alone: a buffer that cannot be made between these GPUs would end the run in the first pass that needs it.
    A collective call over the groups of the layers, for all ranks of the world.

    Raises:
        RuntimeError: it cannot be made here, and other ranks wait for this one in what makes it.
    """
    from megatron_moe_opt.integration.flex_backends import DEEPEP

    if variant != f"{FLEX}:{DEEPEP}":
        return None
    failure, store = None, job_store()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what makes it takes memory that is not PyTorch's
    try:
        fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
        for layer in layers:
            row_bytes = layer.config.hidden_size * max(layer.config.params_dtype.itemsize, 2)  # as Megatron counts
            fused.get_buffer(layer.token_dispatcher.tp_ep_group, row_bytes)
    except Exception as error:  # an assertion or a library's own error, before or in its collectives
        failure = kind_and_reason(error)
    if store is not None:
        turn = f"starts/{variant}/{next(_starts)}"
        store.set(f"{turn}/{dist.get_rank()}", "")
        if failure is not None and not _come(store, [f"{turn}/{rank}" for rank in range(dist.get_world_size())]):
            raise RuntimeError(
                f"--moe-token-dispatcher-type {AUTO} cannot try {variant} on this rank ({failure}), for which others "
                "wait: name a dispatcher"
            )
    return failure


def _come(store: dist.Store, keys: list[str]) -> bool:
    try:
        store.wait(keys, timedelta(seconds=ALIKE_S))
    except RuntimeError:
        return False
    return True


def release_buffers(variant: str) -> None:
    """Frees what Megatron keeps of a variant for the process, however many layers have it: no layer runs it now."""
    if variant == ALLGATHER:
        from megatron.core import parallel_state

        parallel_state.get_global_memory_buffer().buffer.clear()  # whoever else uses one gets it anew
        return
    fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    for name in vars(fused):
        if name.startswith("_") and name.endswith("buffer"):
            setattr(fused, name, None)


def _named(config: Any, variant: str) -> Any:
    """Returns a copy of the configuration, as if the user had named the variant."""
    name, _, backend = variant.partition(":")
    named = copy.copy(config)
    named.moe_token_dispatcher_type = name
    if backend:
        named.moe_flex_dispatcher_backend = backend
    if hasattr(named, "moe_router_topk_limited_devices"):
        named.moe_router_topk_limited_devices = None  # Megatron has made it another option, and refuses both
    return named


def stock_refusal(config: Any, variant: str) -> str | None:
    """Returns why this configuration cannot run a variant, or not as the same function; None: it can."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_moe_opt.integration import flex_backends

    if (config.expert_model_parallel_size or 1) * (config.expert_tensor_parallel_size or 1) == 1:
        return "no rows travel"
    if holds_replicated_tokens(config):
        return NOT_UNDER_STOCK
    # Float16Module casts what a script has left in float32.
    rows = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
    if variant.partition(":")[0] == FLEX and rows != flex_backends.SUMMED:
        return flex_backends.SUMS_BFLOAT16
    for wrong, flag in (
        (config.moe_pad_expert_input_to_capacity, "--moe-pad-expert-input-to-capacity"),
        (overlaps_batches(config), "--overlap-moe-expert-parallel-comm"),
        (config.cuda_graph_impl != "none", f"--cuda-graph-impl {config.cuda_graph_impl}"),
        (quantization(config) is not None, quantization(config)),
        # Of flex alone, which drops tokens by it, and Megatron looks in its first step for who has to be watched.
        (getattr(config, "moe_expert_rank_capacity_factor", None) is not None, "--moe-expert-rank-capacity-factor"),
    ):
        if wrong:
            return f"not tried under {flag}, where Megatron treats dispatchers differently"
    checks = TransformerConfig.__post_init__.__wrapped__  # Megatron's own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checks(_named(config, variant))
    except Exception as error:  # whatever it is that Megatron refuses a configuration with
        return f"Megatron refuses it here: {' '.join(str(error).split())}"
    return None


def needs_as_many_tokens(config: Any, variant: str) -> bool:
    """Whether all ranks must have as many tokens in each pass under a variant."""
    if variant == f"{FLEX}:hybridep":
        return not getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False)
    return variant == ALLGATHER


def _unlike(config: Any, variant: str, fewest: int, most: int) -> str | None:
    if fewest == most or not needs_as_many_tokens(config, variant):
        return None
    return f"takes as many tokens from each rank, and passes had {fewest} to {most}"


def _too_large(variant: str, layers: Sequence[LayerWorkload], spare: int | None) -> str | None:
    if variant != ALLGATHER or spare is None:
        return None
    most = max(_GATHERED * one.tokens * one.ep * one.etp * one.row_bytes for one in layers)
    return None if most <= spare else f"gathers {most} bytes of tokens on each rank, and {spare} are free"
