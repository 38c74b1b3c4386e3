"""Where MPMoE cuts into a MoELayer: its experts run inside the pipeline, partition by partition."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_moe_opt.integration.seams import seam_moved
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.mpmoe_choice import MpmoeLayer
from megatron_moe_opt.runtime.expert_call import Experts


def pipeline_experts(layer: Any, options: Options) -> None:
    """Replaces MoELayer.routed_experts_compute of this layer, which Megatron calls between dispatch and combine.

    Around it the dispatcher's token_dispatch and token_combine leave rows where they are; shared experts that overlap
    with dispatch and combine have their two halves before and after it.

    Raises:
        ConfigurationError: a Megatron whose layer has no such method.
    """
    stock = getattr(layer, "routed_experts_compute", None)
    if stock is None or list(inspect.signature(stock).parameters) != ["hidden_states", "probs"]:
        raise seam_moved("MoELayer.routed_experts_compute(hidden_states, probs) is not there")
    experts = Experts(_runner(layer), ())

    def routed_experts_compute(hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        plugged = layer.token_dispatcher
        tensors = *layer.experts.parameters(), *layer.experts.buffers()
        experts.parameters = tuple(tensor for tensor in tensors if tensor.requires_grad)
        experts.constants = tuple(tensor for tensor in tensors if not tensor.requires_grad)
        return plugged.dispatcher.through_experts(hidden_states, plugged.dispatched, experts), None

    layer.routed_experts_compute = routed_experts_compute


def shape_of_layer(config: Any, ep_size: int, etp_size: int) -> MpmoeLayer:
    """What decides how long a layer's partitions take and what they hold.

    T_M is taken to be what Megatron's own PyTorch experts save.
    """
    return MpmoeLayer.of_experts(
        config.moe_latent_size or config.hidden_size,  # what travels
        config.moe_ffn_hidden_size or config.ffn_hidden_size,
        config.num_moe_experts,
        ep_size,
        etp_size,
        config.params_dtype.itemsize,
        LANE_BYTES,
        config.gated_linear_unit,
        config.bias_activation_fusion,
    )


def _runner(layer: Any) -> Any:
    def run(tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        output, bias = layer.experts(tokens, tokens_per_expert, probs)
        if bias is not None:
            raise RuntimeError(f"{type(layer.experts).__name__} returns a bias, which stock dispatchers do not add")
        return output

    return run
