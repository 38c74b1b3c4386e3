"""Megatron-Core on the ranks of the pool: parallel state, small configurations, layers."""

from __future__ import annotations

import gc
import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

# Layout -> state of megatron.core.parallel_state after initializing it. Making a layout's groups takes seconds, and
# Megatron does not destroy most of them: each layout is made once in a rank's life.
_layouts: dict[tuple[int | None, ...], dict[str, Any]] = {}
_trained: WeakSet[DistributedDataParallel] = WeakSet()
"""What `gpt` has built. It is emptied when its groups are gone: hooks of its parameters have it, in cycles through the
optimizer that the garbage collector does not see, and hundreds of models would stay for the rest of a rank's life.
"""


def _state() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if not name.startswith("__") and not isinstance(value, (type, types.FunctionType, types.ModuleType))
    }


@contextmanager
def parallel(
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    seed: int = 1234,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[None]:
    """Megatron's model parallel groups over all ranks, and its random seeds, inside the block.

    `vpp` is the number of virtual stages of a pipeline rank; None: no interleaving. Data parallelism takes the rest of
    the ranks. `timeout` is that of groups that are made now. All ranks must enter with the same sizes.
    """
    outside = _state()
    layout = (tp, ep, etp, cp, pp, vpp)
    if layout not in _layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
        )
        _layouts[layout] = _state()
    try:
        vars(parallel_state).update(_layouts[layout])
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        loss_scale = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
        MoEAuxLossAutoScaler.set_loss_scale(loss_scale)
        yield
    finally:
        forget_losses()
        if _trained:
            for chunk in _trained:
                vars(chunk).clear()
            gc.collect()  # before the layers of the next model, which send experts in the same groups
        vars(parallel_state).update(outside)


def ends_with_groups(chunk: DistributedDataParallel) -> DistributedDataParallel:
    """Returns a part of a model, which can be freed once `parallel` has ended."""
    _trained.add(chunk)
    return chunk


def forget_losses() -> None:
    """Empties what Megatron keeps of auxiliary losses, a number for each layer: the next model may have more."""
    moe_utils.clear_aux_losses_tracker()
    vars(moe_utils).get("_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # from 0.18 on
        importlib.import_module("megatron.core.transformer.moe.moe_logging").destroy_moe_metrics_tracker()


def moe_config(**overrides: Any) -> TransformerConfig:
    """A small MoE configuration for the present parallel state: hidden 64, 8 experts, top-2, SequentialMLP, fp32.

    Parallel sizes follow `parallel`; sequence parallelism is on with tp > 1. Any field can be overridden.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 96,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "deterministic_mode": False,
    }
    fields.update(overrides)
    return TransformerConfig(**fields)
