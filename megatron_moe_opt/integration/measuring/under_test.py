"""A Megatron-Core MoE layer as the benchmark runs it: fixed weights, input, routing and output gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe_opt import register
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.auto_layer import current_controller
from megatron_moe_opt.integration.auto.controller import Controller
from megatron_moe_opt.integration.flex_backends import DEFAULT
from megatron_moe_opt.integration.layer.moe_layer import build_layer, forget_migrated_experts, impose_routing
from megatron_moe_opt.integration.measuring.layer_settings import ROUTER_DTYPE, LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.workloads import choose_experts
from megatron_moe_opt.integration.observe.telemetry import take_records, watch
from megatron_moe_opt.integration.registry import without_model
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.runtime.engine.recording import clock, recording
from megatron_moe_opt.runtime.observed.layer_pass import Direction, Instant
from megatron_moe_opt.schedules.stages import BACKWARD, FORWARD, PassInstants
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.variants import FLEX, split_variant


def fused(dtype: torch.dtype) -> dict[str, bool]:
    """Returns the fields of Megatron's configuration by which a layer permutes rows and computes experts with
    Transformer Engine, as most jobs on GPUs do: true where it is installed. Experts of float32 stay Megatron's own
    SequentialMLP: products of Transformer Engine are TF32's.
    """
    is_here = torch.cuda.is_available() and find_spec("transformer_engine") is not None
    return {"moe_permute_fusion": is_here, "moe_grouped_gemm": is_here and dtype is torch.bfloat16}


def layer_config(settings: LayerSettings, variant: str, **changes: Any) -> TransformerConfig:
    """Returns Megatron's configuration of the layer: no biases, no auxiliary loss, router in fp32, imposed routing, and
    what is `fused`.

    Args:
        settings: of a layer whose `ep` is known, see LayerSettings.on.
        changes: fields of the configuration in the place of these.
    """
    dtype = torch_dtype(settings.dtype)
    dispatcher, _, setting = variant.partition(":")
    flex = {"moe_flex_dispatcher_backend": setting or DEFAULT} if dispatcher == FLEX else {}
    fields = dict(
        **flex,
        num_layers=1,
        hidden_size=settings.hidden,
        num_attention_heads=settings.tp,  # the layer has no attention; Megatron wants heads that tp divides
        hidden_dropout=0.0,  # nor a residual to drop, with which netmoe does not train
        ffn_hidden_size=settings.ffn_hidden,
        moe_ffn_hidden_size=settings.ffn_hidden,
        num_moe_experts=settings.experts,
        moe_router_topk=settings.topk,
        moe_router_pre_softmax=settings.topk == 1,  # softmax over a single choice would be 1, without a gradient
        moe_router_load_balancing_type="none",
        moe_router_dtype=ROUTER_DTYPE,
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type=dispatcher,
        moe_expert_capacity_factor=settings.capacity_factor,
        moe_pad_expert_input_to_capacity=settings.pad_to_capacity,
        moe_shared_expert_intermediate_size=settings.shared_ffn_hidden,
        moe_shared_expert_overlap=settings.shared_ffn_hidden is not None,
        **fused(dtype),
        add_bias_linear=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=settings.tp > 1 and not settings.replicated,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=settings.expert_tp,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )
    with without_model():
        return TransformerConfig(**(fields | changes))


@dataclass
class LayerUnderTest:
    """The layer of one dispatcher, with everything that a step needs."""

    layer: MoELayer
    tokens: torch.Tensor
    """The input [tokens of this rank, 1, hidden], a leaf that collects the input gradient."""
    output_grad: torch.Tensor
    """The gradient that backward begins with, of the shape of `tokens`."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns what gets a gradient: the input, the router's and the experts' weights."""
        return self.tokens, *self.layer.parameters()

    def clear_grads(self) -> None:
        """Zeroes the gradients in place, so that a step allocates none."""
        for tensor in self.leaves:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            else:
                tensor.grad.zero_()

    def forward(self) -> torch.Tensor:
        """Returns the layer's output [T, H] for this rank's tokens, with the graph that backward goes through."""
        return self.layer(self.tokens)[0]

    def step(self) -> torch.Tensor:
        """Runs forward and backward, and returns the output. Experts that travel do so in every step."""
        forget_migrated_experts(self.layer)
        output = self.forward()
        output.backward(self.output_grad)
        return output

    def observed_step(self) -> tuple[list[Timeline], list[PassInstants]]:
        """Returns the timelines of the schedules of one step, which all ranks begin together, and when the layer's
        passes came to their stages: none of these unless it is watched.
        """
        self.clear_grads()
        dist.barrier()
        take_records()
        now = clock()
        begin = now.now()
        with recording() as timelines:
            self.step()
        now.settle()
        passes = [one for record in take_records() for one in record.first.take()]
        directions = [(FORWARD, one.forward) for one in passes] + [(BACKWARD, one.backward) for one in passes]
        return timelines, [_stages(name, one, lambda instant: now.seconds(begin, instant))
                           for name, one in directions if one.is_whole]  # fmt: skip

    def watch(self) -> None:
        """Has the stages of every step observed from now on, where this Megatron's layer has them."""
        with suppress(ConfigurationError):
            watch(self.layer, stride=1)

    def results(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns output and gradients of one step; an expert's are summed over the ranks that hold the same weight."""
        self.clear_grads()
        output = self.step().detach()
        grads = [tensor.grad.clone() for tensor in self.leaves]
        of_experts = set(self.layer.experts.parameters())
        for tensor, grad in zip(self.leaves, grads, strict=True):
            if tensor in of_experts:
                dist.all_reduce(grad, group=parallel_state.get_expert_data_parallel_group())
        return output, grads


def _stages(name: str, direction: Direction, seconds: Callable[[Instant], float]) -> PassInstants:
    edges = direction.begin, direction.exchange_begin, direction.exchange_end, direction.end
    begin, exchange_begin, exchange_end, end = map(seconds, edges)
    return PassInstants(name, begin, exchange_begin, tuple(direction.merged_calls(seconds)), exchange_end, end)


@dataclass
class DispatchUnderTest(LayerUnderTest):
    """Dispatch and combine alone: no router, and experts that return what they get."""

    probs: torch.Tensor
    """The probabilities [tokens, experts], a leaf that collects their gradient."""
    routing_map: torch.Tensor
    """The experts of each token, bool [tokens, experts]."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns what gets a gradient: the input and the probabilities."""
        return self.tokens, self.probs

    def forward(self) -> torch.Tensor:
        """Returns each token as the sum of its copies, from experts that return what they get."""
        dispatcher = self.layer.token_dispatcher
        tokens, probs = dispatcher.dispatch_preprocess(self.tokens, self.routing_map, self.probs)
        tokens, probs = dispatcher.token_dispatch(tokens, probs)
        tokens, _, probs = dispatcher.dispatch_postprocess(tokens, probs)
        tokens = dispatcher.combine_preprocess(ReturnTokens.apply(tokens, probs))
        return dispatcher.combine_postprocess(dispatcher.token_combine(tokens))


class ReturnTokens(torch.autograd.Function):
    """Returns the tokens as they are, and a gradient of ones for the probabilities."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(probs)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones_like(ctx.saved_tensors[0])


def layers_under_test(
    settings: LayerSettings, device: torch.device, groups: Any = None, **changes: Any
) -> dict[str, LayerUnderTest]:
    """Returns one layer for each dispatcher: same weights, input, routing and output gradient. Arguments: see below."""
    layers: dict[str, LayerUnderTest] = {}
    for variant in settings.dispatchers:
        layers[variant] = layer_under_test(settings, variant, device, groups, **changes)
        first = next(iter(layers.values())).layer
        layers[variant].layer.load_state_dict(first.state_dict())
    return layers


def layer_under_test(
    settings: LayerSettings, variant: str, device: torch.device, groups: Any = None, **changes: Any
) -> LayerUnderTest:
    """Returns the layer of a variant (see split_variant), ready for a step.

    Args:
        settings: see layer_config.
        groups: Megatron's ProcessGroupCollection in the place of the groups that it has made.
        changes: see layer_config.
    """
    rank = settings.data_rank(dist.get_rank())
    generator = torch.Generator().manual_seed((settings.seed << 20) + rank)
    shape = (settings.tokens, 1, settings.hidden)
    dtype = torch_dtype(settings.dtype)
    tokens, output_grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    indices = choose_experts(
        settings.routing,
        tokens=settings.tokens,
        experts=settings.experts,
        topk=settings.topk,
        seed=settings.seed,
        rank=rank,
    )
    dispatcher, options = split_variant(variant, settings.profile)
    register(options)
    layer = build_layer(layer_config(settings, variant, **changes), groups)
    common = layer, tokens.requires_grad_(), output_grad
    if settings.dispatch_only:
        routing_map = torch.zeros(settings.tokens, settings.experts, dtype=torch.bool, device=device)
        routing_map.scatter_(1, indices.to(device), True)
        probs = (routing_map / settings.topk).requires_grad_()
        return DispatchUnderTest(*common, probs, routing_map)
    impose_routing(layer, indices.to(device))
    under_test = LayerUnderTest(*common)
    if dispatcher == AUTO:

        def step() -> None:
            under_test.clear_grads()
            under_test.step()

        settle(current_controller(), step)
    return under_test


def settle(controller: Controller, step: Callable[[], None]) -> None:
    """Runs steps of layers under `auto` until it has chosen. A collective call over the world."""
    while not controller.settled:
        step()
        controller.after_step()
