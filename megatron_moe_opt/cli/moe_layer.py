"""A Megatron-Core MoE layer as the benchmark runs it: fixed weights, input, routing and output gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe_opt import register
from megatron_moe_opt.cli.layer_settings import LayerSettings, split_variant
from megatron_moe_opt.cli.routing import choose_experts
from megatron_moe_opt.integration.moe_layer import build_layer, impose_routing


def layer_config(settings: LayerSettings, dispatcher: str, ep: int, permute_fusion: bool) -> TransformerConfig:
    """Megatron's configuration of the layer.

    SequentialMLP experts (they run everywhere), no biases, no auxiliary loss, router in fp32, imposed routing.
    """
    dtype = settings.torch_dtype
    return TransformerConfig(
        num_layers=1,
        hidden_size=settings.hidden,
        num_attention_heads=settings.tp,  # the layer has no attention; Megatron wants heads that tp divides
        ffn_hidden_size=settings.ffn_hidden,
        moe_ffn_hidden_size=settings.ffn_hidden,
        num_moe_experts=settings.experts,
        moe_router_topk=settings.topk,
        moe_router_pre_softmax=settings.topk == 1,  # softmax over a single choice would be 1, without a gradient
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type=dispatcher,
        moe_expert_capacity_factor=settings.capacity_factor,
        moe_pad_expert_input_to_capacity=settings.pad_to_capacity,
        moe_permute_fusion=permute_fusion,
        moe_grouped_gemm=False,
        add_bias_linear=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.tp > 1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=settings.expert_tp,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


@dataclass
class LayerUnderTest:
    """One dispatcher's layer with everything a step needs."""

    layer: MoELayer
    tokens: torch.Tensor
    """[tokens of this rank, 1, hidden], a leaf that collects the input gradient."""
    output_grad: torch.Tensor
    """As `tokens`."""

    def clear_grads(self) -> None:
        """Zeroes the gradients in place, so that a step allocates none."""
        for tensor in (self.tokens, *self.layer.parameters()):
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            else:
                tensor.grad.zero_()

    def step(self) -> torch.Tensor:
        """Forward and backward; returns the output."""
        output, _ = self.layer(self.tokens)
        output.backward(self.output_grad)
        return output

    def results(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output and gradients (input, router, experts) of one step."""
        self.clear_grads()
        output = self.step().detach()
        return output, [tensor.grad.clone() for tensor in (self.tokens, *self.layer.parameters())]


def layers_under_test(
    settings: LayerSettings, ep: int, device: torch.device, permute_fusion: bool
) -> dict[str, LayerUnderTest]:
    """One layer for each dispatcher: same weights, input, routing and output gradient."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed((settings.seed << 20) + rank)
    shape = (settings.tokens, 1, settings.hidden)
    tokens, output_grad = (torch.randn(shape, generator=generator).to(device, settings.torch_dtype) for _ in range(2))
    indices = choose_experts(
        settings.routing,
        tokens=settings.tokens,
        experts=settings.experts,
        topk=settings.topk,
        seed=settings.seed,
        rank=rank,
    )
    layers: dict[str, LayerUnderTest] = {}
    for variant in settings.dispatchers:
        dispatcher, options = split_variant(variant, settings.profile)
        register(options)
        layer = build_layer(layer_config(settings, dispatcher, ep, permute_fusion))
        if layers:
            layer.load_state_dict(next(iter(layers.values())).layer.state_dict())
        impose_routing(layer, indices.to(device))
        layers[variant] = LayerUnderTest(layer, tokens.clone().requires_grad_(), output_grad)
    return layers
