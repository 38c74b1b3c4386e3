"""What the stages of a layer hand on, and what is freed between them, where Megatron calls them itself."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_moe_opt
from megatron_moe_opt.integration.layer.overlapped_batches import (
    before_pass,
    edge_of,
    keep_expert_inputs,
    note_stock,
    with_edge,
)


class Layer(torch.nn.Module):
    """What routes in a layer, without a router."""

    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True)

    def route(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        return self, hidden_states, padding_mask


def test_a_pass_begins_where_a_layer_routes_in_its_copies_too():
    layer, begun, tokens, mask = Layer(), [], torch.zeros(3, 1, 4), torch.zeros(3, 1)
    before_pass(layer, lambda *of: begun.append(of))
    once = before_pass(layer, lambda *_: once.remove())
    other = before_pass(layer, lambda *of: begun.append(of))
    assert layer.route(tokens, mask) == (layer, tokens, mask) and begun == [(layer, (tokens,))] * 2
    other.remove()
    copied = copy.deepcopy(layer)
    assert copied.route(tokens) == (copied, tokens, None) and begun[2:] == [(copied, (tokens,))]


def test_probabilities_have_a_gradient_through_the_edge_and_nothing_else_of_it():
    probs, arrived = torch.rand(3, 4, requires_grad=True), torch.rand(5, requires_grad=True)
    edge = edge_of(probs)
    assert edge.numel() == 0 and edge.untyped_storage().data_ptr() != probs.untyped_storage().data_ptr()
    detached = edge.detach().requires_grad_()
    handed_on = with_edge(arrived, detached)
    assert torch.equal(handed_on, arrived)
    handed_on.sum().backward()
    assert detached.grad is not None and detached.grad.shape == (0,)
    edge.backward(detached.grad)
    assert torch.equal(probs.grad, torch.zeros(3, 4)) and torch.equal(arrived.grad, torch.ones(5))


def test_inputs_of_experts_are_kept_for_ours_alone():
    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register()
    keep_expert_inputs(("monta",))
    from megatron.core.models.gpt import fine_grained_callables as callables

    try:
        from megatron.core.models.common.utils import should_free_input
    except ImportError:
        should_free_input = callables.should_free_input
    nodes, freed = ("mlp", "moe_dispatch", "moe_combine"), {}
    for name in ("alltoall", "monta"):
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, add_bias_linear=False,
            moe_token_dispatcher_type=name,
        )  # fmt: skip
        rest = [2] * (len(inspect.signature(should_free_input).parameters) - 3)  # local experts, from 0.17 on
        freed[name] = {node: should_free_input(node, True, config, *rest) for node in nodes}
    assert freed["alltoall"] == dict.fromkeys(nodes, True)
    assert freed["monta"] == freed["alltoall"] | {"mlp": False}
    note_stock(config, True)  # as under `auto`, whose layers run stock's at times
    for local_experts in (1, 2):  # one: stock's hands on to it what has arrived
        rest = [local_experts] * len(rest)
        config.moe_token_dispatcher_type = "alltoall"
        stocks = should_free_input("mlp", True, config, *rest)
        config.moe_token_dispatcher_type = "monta"
        assert should_free_input("mlp", True, config, *rest) == stocks
    note_stock(config, False)
    assert not should_free_input("mlp", True, config, *rest)
