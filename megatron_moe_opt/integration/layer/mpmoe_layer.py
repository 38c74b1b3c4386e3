"""Where MPMoE cuts into a MoELayer: its experts run inside the pipeline, partition by partition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.expert_migration_layer import WatchedExperts, experts_to_migrate
from megatron_moe_opt.integration.layer.experts_of_owners import call_experts, without_fused_gradients
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot
from megatron_moe_opt.integration.optimizer_step import before_optimizer_step
from megatron_moe_opt.integration.random_states import AllRandomStates
from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.through_experts.expert_call import Experts
from megatron_moe_opt.runtime.through_experts.products import Products
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts
from megatron_moe_opt.systems.mpmoe import ROUNDS_EACH

if TYPE_CHECKING:
    from megatron_moe_opt.dispatchers.mpmoe import MpmoeDispatcher

_PRODUCTS = ("linear_fc1", "linear_fc2")
_choosing: WeakSet[MpmoeDispatcher] = WeakSet()
"""Those that choose partitions once an optimizer step."""


def pipeline_experts(layer: Any, options: Options) -> None:
    """Replaces MoELayer.routed_experts_compute of this layer, which Megatron calls between dispatch and combine.

    Around it the dispatcher's token_dispatch and token_combine leave rows where they are. Shared experts that overlap
    with dispatch and combine are ops of the pipeline, too. Experts travel where the dispatcher's tokens hop between
    domains of several ranks. A collective call over the layer's groups, then.

    Raises:
        ConfigurationError: a Megatron whose layer has no such method.
    """
    seam = LayerSeam(layer)
    seam.stock(LayerSlot.EXPERTS)  # refused before any rank waits for another
    dispatcher = layer.token_dispatcher.dispatcher
    if dispatcher.hops is not None and dispatcher.hops.groups.migrates:
        migrate, hooks = experts_to_migrate(layer, options)
        dispatcher.migrated = migrate(dispatcher.hops.groups, dispatcher.hops.tables.owners)
        run = functools.partial(_run_all, layer, dispatcher.migrated, WatchedExperts(layer, hooks))
    else:
        run = functools.partial(_run, layer)
    fuses = bool(getattr(layer.config, "gradient_accumulation_fusion", False))
    may_cut = options.partition_counts != (1,)
    experts = Experts(run, (), random_states=AllRandomStates, fuses=fuses)
    # Parameters that a graph has twice get their gradient once from autograd, and from each pipeline: DDP counts these.
    config = layer.config
    is_once_in_graph = getattr(config, "mlp_chunks_for_training", 1) == 1
    is_once_in_graph &= not getattr(config, "mtp_use_repeated_layer", False)
    layer.token_dispatcher.pipelines_shared_experts = is_once_in_graph
    if dispatcher.chooses_once_a_step:
        _choosing.add(dispatcher)
        before_optimizer_step(_begin_step)

    def routed_experts_compute(hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        plugged = layer.token_dispatcher
        tensors = *layer.experts.parameters(), *layer.experts.buffers()
        of_pass = dataclasses.replace(  # what is trained in this pass, whatever a later one trains before its backward
            experts,
            parameters=tuple(tensor for tensor in tensors if tensor.requires_grad),
            constants=tuple(tensor for tensor in tensors if not tensor.requires_grad),
            products=tuple(Products(one, *_PRODUCTS) for one in layer.experts.modules() if _multiplies(one)),
        )
        dispatched, migrated = plugged.dispatched, plugged.dispatcher.migrated
        # In a pass of one partition, too, if others may have several: DDP adds no gradient that autograd brings to a
        # main_grad to which a GEMM has added in the same step.
        if fuses and may_cut and any(map(_has_narrow_main_grad, of_pass.parameters)):
            _check_fusion_can_be_left_out(layer.config)
            of_pass = dataclasses.replace(of_pass, run=functools.partial(_run_unfused, layer, run), fuses=False)
        if migrated is not None:
            migrated.fetch(dispatched.rows.news)  # on their way while the first partitions are
            of_pass.borrowed, of_pass.stand_ins = migrated.borrowed(), migrated.stand_ins(dispatched.rows.lent)
        shared = plugged.take_shared_experts()
        returned, output = plugged.dispatcher.through_experts(hidden_states, dispatched, of_pass, shared)
        if shared is not None:
            plugged.give_shared_output(output)
        return returned if migrated is None else migrated.back_in_backward(returned), None

    seam.put(LayerSlot.EXPERTS, routed_experts_compute)


def _begin_step() -> None:
    for dispatcher in tuple(_choosing):
        dispatcher.begin_step()


def _run(
    layer: Any, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, _: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns the outputs of this rank's experts."""
    return _without_bias(layer, *layer.experts(tokens, tokens_per_expert, probs))


def _run_unfused(layer: Any, run: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Returns what `run` does. Weights' gradients, of which there is one a partition, are summed before they are added
    to main_grad.
    """
    with without_fused_gradients(layer.experts):
        return run(*given)


def _has_narrow_main_grad(parameter: torch.Tensor) -> bool:
    """Whether gradients are added up in fewer bits than float32 has, as under --grad-reduce-in-bf16."""
    main_grad = getattr(parameter, "main_grad", None)
    return main_grad is not None and main_grad.itemsize < torch.float32.itemsize


def _check_fusion_can_be_left_out(config: Any) -> None:
    """Refuses, with ConfigurationError, operations that were told to add to main_grad when they were made: where it
    was not seen in Megatron-LM's arguments before.
    """
    if getattr(config, "use_transformer_engine_op_fuser", False):
        raise ConfigurationError(ROUNDS_EACH)


def _run_all(
    layer: Any,
    migrated: MigratedExperts,
    watched: WatchedExperts,
    tokens: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    probs: torch.Tensor,
    of_others: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Returns the outputs of the experts of all owners, with the parameters that have travelled here."""
    own = dict(layer.experts.named_parameters())
    of_owners = [own if parameters is None else parameters for parameters in migrated.by_owner(of_others)]
    with watched:
        return _without_bias(layer, *call_experts(layer.experts, of_owners, tokens, tokens_per_expert, probs))


def _multiplies(module: torch.nn.Module) -> bool:
    """Whether a module is an expert as Megatron builds them, one (MLP) or all of a rank (TEGroupedMLP)."""
    return all(module._modules.get(name) is not None for name in _PRODUCTS)


def _without_bias(layer: Any, output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        raise RuntimeError(f"{type(layer.experts).__name__} returns a bias, which stock dispatchers do not add")
    return output
