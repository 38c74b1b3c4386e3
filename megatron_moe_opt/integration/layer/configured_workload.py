"""What Megatron's configuration says about a MoE layer, as the planner takes it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe_opt.integration.layer.replicated_tokens import (
    holds_replicated_tokens,
    keeps_from_splitting_rows,
    routes_together,
)
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload, resident_part
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.topology.expert_groups import ExpertGroups


def layer_workload(
    config: Any,
    groups: ExpertGroups,
    workers: tuple[int, ...] = (),
    resident: int | None = None,
    tokens: int = 0,
    wire: Wire = SAME,
) -> LayerWorkload:
    """Returns the workload of one micro-batch, routed evenly.

    Args:
        config: Megatron's TransformerConfig.
        workers: of each network level of the expert-parallel group; empty: not known.
        resident: layers whose gathered experts stay in memory; None: all.
        tokens: that a rank enters the layer with.
        wire: how rows travel.
    """
    layers = moe_layers(config)
    with_experts = config.num_layers if layers is None else len(layers)  # no more than that
    return LayerWorkload(
        tokens=tokens,
        hidden=config.moe_latent_size or config.hidden_size,
        ffn=(config.moe_ffn_hidden_size or config.ffn_hidden_size) // groups.etp_size,
        gated=config.gated_linear_unit,
        experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        element_bytes=config.params_dtype.itemsize,
        lane_bytes=LANE_BYTES,
        ep=groups.ep_size,
        etp=groups.etp_size,
        tp=config.tensor_model_parallel_size if holds_replicated_tokens(config) else 1,
        routes_all=keeps_from_splitting_rows(config) is None and not routes_together(config),
        capacity_factor=config.moe_expert_capacity_factor,
        workers=workers,
        fused=config.bias_activation_fusion,
        wire=wire,
        prob_bytes={"fp32": 4, "fp64": 8}.get(config.moe_router_dtype),
        resident_part=resident_part(with_experts / config.pipeline_model_parallel_size, resident),
    )


def moe_layers(config: Any) -> list[int] | None:
    """Returns the numbers of the MoE layers of the whole model, without those of multi-token prediction; None: it is a
    hybrid model, and no command line of Megatron-LM's says of which layers.
    """
    symbols, every = _symbols_of_layers(), config.moe_layer_freq
    if symbols is not None:  # such models have no regard to the frequency
        has_experts = [symbol == "E" for symbol in symbols]
    elif config.is_hybrid_model:
        return None
    elif isinstance(every, int):
        has_experts = [number % every == 0 for number in range(config.num_layers)]
    else:
        has_experts = every  # 0 and 1 for each layer
    return [number for number, has in enumerate(has_experts, start=1) if has]


def _symbols_of_layers() -> str | None:
    """Returns a symbol for each layer of a hybrid model, without those of multi-token prediction; None: Megatron-LM's
    command line has none.
    """
    names = "hybrid_layer_pattern", "hybrid_override_pattern"  # from 0.17 on, and before
    pattern = next((given for name in names if (given := getattr(training_arguments(), name, None))), None)
    if pattern is None:
        return None
    main, *_ = pattern.split("/")  # multi-token prediction's follow, a pattern for each depth
    return main.replace("|", "")  # which parts stages of the pipeline


def type_of_rows(config: Any) -> str:
    """Returns the type of rows and weights in the word that profiles and plans have for it. Rows of half precision are
    as long, and computed as fast, in either type.
    """
    return "fp32" if config.params_dtype is torch.float32 else "bf16"
