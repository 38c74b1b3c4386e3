"""MoE layers on the ranks of the pool: how they are routed and run, and what they compute beside stock's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.ranks.devices import difference, same

SEQUENCE, BATCH = 24, 3  # 3 sequences of 24 tokens: nothing divides the 8 experts evenly


def route_to(layer: Any, routing: str, seed: int) -> None:
    """Imposes a routing on the layer; the probabilities still come from (and train) its router."""
    router, config = layer.router, layer.config
    generator = torch.Generator().manual_seed(seed)

    def forward(hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden.shape[0] * hidden.shape[1]
        routing_map = imposed_map(routing, tokens, config.num_moe_experts, config.moe_router_topk, generator)
        scores = torch.sigmoid(router.gating(hidden)).view(tokens, -1)
        return scores * routing_map, routing_map

    router.forward = forward


def take_turns(layer: Any, numbers: Sequence[int]) -> None:
    """Has tokens go, in turn, to so many experts each, as a hook of a user's own may have it."""

    def choose(
        router: Any, inputs: tuple[torch.Tensor, ...], _: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(router.gating(inputs[0]).view(-1, router.config.num_moe_experts), -1)
        of_tokens = torch.tensor(numbers).repeat(-(-len(scores) // len(numbers)))[: len(scores), None]
        routing_map = scores.argsort(-1, descending=True).argsort(-1) < of_tokens
        return scores * routing_map, routing_map

    layer.router.register_forward_hook(choose)


OWN_ROUTING = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
"""Settings under which a router does not count its experts beside."""


def imposed_map(routing: str, tokens: int, experts: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """bool [tokens, experts]: `hot` all to the first experts, `skewed` Zipf, `ragged` 0 to top-k experts a token."""
    weights = torch.ones(tokens, experts)
    if routing == "hot":  # the other experts, and all ranks but the first, get nothing
        weights[:, topk:] = 1e-9
    elif routing == "skewed":
        weights /= torch.arange(1, experts + 1) ** 2
    chosen = torch.multinomial(weights.cpu(), topk, generator=generator).to(weights.device)
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    if routing == "ragged":
        routing_map &= torch.rand(tokens, experts, generator=generator) < 0.5
    return routing_map


def run_layer(layer: Any, hidden: torch.Tensor, steps: int = 1, together: bool = False) -> dict[str, torch.Tensor]:
    """Outputs, input gradients and weight gradients of `steps` forward and backward passes.

    Args:
        together: all forward passes come before the backward passes.
    """
    layer.zero_grad()
    inputs = [(hidden * (1 + step)).detach().requires_grad_() for step in range(steps)]
    outputs = (layer(one)[0] for one in inputs)
    results = {}
    for step, output in enumerate(list(outputs) if together else outputs):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7 + step + dist.get_rank()))
        (output.float() * weights).sum().backward()
        results |= {f"output {step}": output.detach(), f"input grad {step}": inputs[step].grad}
    return results | {f"grad {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}


class BesideStock:
    """A layer of stock `alltoall`, and what layers of ours with its weights make of its tokens; inside `parallel`."""

    def __init__(
        self,
        settings: dict[str, Any],
        routing: str | None = None,
        dtype: str = "float32",
        steps: int = 1,
        together: bool = False,
        sequence: int = SEQUENCE,
    ) -> None:
        """
        Args:
            settings: fields of the configuration, in the place of those of `moe_config`.
            routing: see `imposed_map`; None: what the router chooses.
            steps, together: see `run_layer`.
            sequence: tokens of a sequence on all ranks that share it.
        """
        from tests.ranks.megatron import moe_config

        torch.manual_seed(11 + dist.get_rank())
        self._routing, self._dtype, self._steps, self._together = routing, getattr(torch, dtype), steps, together
        fields = {"moe_router_pre_softmax": True, "bf16": dtype == "bfloat16"} | settings  # top-1 needs pre-softmax
        self._config = config = moe_config(**fields)
        self.stock = self._built(config)
        tokens = sequence // (config.tensor_model_parallel_size * config.context_parallel_size)
        self._hidden = torch.randn(tokens, BATCH, config.hidden_size).to(self._dtype)

    def ours(self, dispatcher: str, options: Options | None = None, **changes: Any) -> Any:
        """A layer with stock's weights, under one of our dispatchers; `changes` are fields that stock has otherwise."""
        import megatron_moe_opt

        megatron_moe_opt.register(options)
        layer = self._built(dataclasses.replace(self._config, moe_token_dispatcher_type=dispatcher, **changes))
        megatron_moe_opt.register()
        assert type(layer.token_dispatcher).__name__ == "PluggedTokenDispatcher"
        layer.load_state_dict(self.stock.state_dict())
        return layer

    def run(self, layer: Any) -> dict[str, torch.Tensor]:
        """What a layer makes of the tokens: see `run_layer`."""
        return run_layer(layer, self._hidden, self._steps, self._together)

    def evaluated(self, layer: Any) -> torch.Tensor:
        """What a layer makes of the tokens without a graph, in evaluation."""
        with torch.no_grad():
            return layer(self._hidden)[0]

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """What stock makes of them."""
        return self.run(self.stock)

    def errors(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        """Returns, for each result, the norm of its difference from stock's over stock's norm."""
        self._check_names(found)
        return {name: difference(found[name], self.expected[name]) for name in found}

    def differing(self, found: dict[str, torch.Tensor]) -> list[str]:
        """The results that are not stock's, bit for bit on the host."""
        self._check_names(found)
        return [name for name in found if not same(found[name], self.expected[name])]

    def _check_names(self, found: dict[str, torch.Tensor]) -> None:
        assert found.keys() == self.expected.keys()
        assert all(any(part in name for name in found) for part in ("router", "experts"))

    def _built(self, config: Any) -> Any:
        from megatron_moe_opt.integration.layer.moe_layer import build_layer

        layer = build_layer(config).to(self._dtype)
        if self._routing is not None:
            route_to(layer, self._routing, seed=3 + dist.get_rank())
        return layer


def layer_with(settings: Any, dispatcher: str, options: Options) -> Any:
    """The layer of the benchmark's LayerSettings with options that no variant's name says, routed by its own router."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest, layer_config

    megatron_moe_opt.register(options)
    layer = build_layer(layer_config(settings, dispatcher))
    megatron_moe_opt.register()
    tokens, output_grad = (torch.randn(settings.tokens, 1, settings.hidden) for _ in range(2))
    return LayerUnderTest(layer, tokens.requires_grad_(), output_grad)
