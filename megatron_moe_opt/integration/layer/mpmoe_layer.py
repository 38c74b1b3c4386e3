"""Where MPMoE cuts into a MoELayer: its experts run inside the pipeline, partition by partition."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.through_experts.expert_call import Experts


def pipeline_experts(layer: Any, options: Options) -> None:
    """Replaces MoELayer.routed_experts_compute of this layer, which Megatron calls between dispatch and combine.

    Around it the dispatcher's token_dispatch and token_combine leave rows where they are; shared experts that overlap
    with dispatch and combine have their two halves before and after it.

    Raises:
        ConfigurationError: a Megatron whose layer has no such method.
    """
    experts = Experts(_runner(layer), ())

    def routed_experts_compute(hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        plugged = layer.token_dispatcher
        tensors = *layer.experts.parameters(), *layer.experts.buffers()
        experts.parameters = tuple(tensor for tensor in tensors if tensor.requires_grad)
        experts.constants = tuple(tensor for tensor in tensors if not tensor.requires_grad)
        return plugged.dispatcher.through_experts(hidden_states, plugged.dispatched, experts), None

    LayerSeam(layer).put(LayerSlot.EXPERTS, routed_experts_compute)


def _runner(layer: Any) -> Any:
    def run(tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        output, bias = layer.experts(tokens, tokens_per_expert, probs)
        if bias is not None:
            raise RuntimeError(f"{type(layer.experts).__name__} returns a bias, which stock dispatchers do not add")
        return output

    return run
