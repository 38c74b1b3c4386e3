"""A single Megatron-Core MoE layer, for benchmarks and tests."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


def build_layer(config: TransformerConfig, groups: Any = None) -> MoELayer:
    """Returns the layer that Megatron's own specification describes, as layer 1: with Transformer Engine where experts
    are grouped.

    Args:
        groups: a ProcessGroupCollection in the place of the groups that Megatron has made.
    """
    spec = moe_spec(config)
    # A ModuleSpec up to Megatron-Core 0.17, a partial of the class from 0.18 on.
    of_groups = {} if groups is None else {"pg_collection": groups}
    is_partial = isinstance(spec, functools.partial)
    layer = spec(config, **of_groups) if is_partial else build_module(spec, config, **of_groups)
    layer.set_layer_number(1)
    return layer.cuda()  # Megatron makes the router, and the gate of shared experts, on the host


def moe_spec(config: TransformerConfig) -> Any:
    """Returns what Megatron's own specification says of an MoE layer."""
    return get_moe_module_spec(
        use_te=config.moe_grouped_gemm,  # grouped experts are Transformer Engine's
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )


def impose_routing(layer: MoELayer, experts: torch.Tensor) -> None:
    """Sends tokens to these experts from now on; the probabilities still come from the router, and train it.

    Args:
        layer: of a configuration with moe_enable_routing_replay.
        experts: int64 [tokens, topk], topk different ones. A router that sees its TP rank's part of the tokens gets the
            rows of that part.
    """
    router = layer.router
    layer.config.moe_enable_routing_replay = False  # the router has it; dispatchers may count on topk rows a token
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def choose(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        num_tokens = inputs[0].shape[:-1].numel()
        parts = experts.split(num_tokens)
        router.router_replay.set_target_indices(parts[layer.tp_group.rank()] if len(parts) > 1 else experts)

    router.register_forward_pre_hook(choose)


def forget_migrated_experts(layer: MoELayer) -> None:
    """Has experts that travel travel again in the next pass, as after an optimizer step.

    The passes so far are taken for another model's: no layer of theirs is sent ahead.
    """
    dispatcher = getattr(layer.token_dispatcher, "dispatcher", None)
    migrated = getattr(dispatcher, "migrated", None)
    if migrated is not None:
        migrated.forget()
        migrated.communicator.forget_passes()
