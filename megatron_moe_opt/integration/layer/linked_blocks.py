"""Blocks of Megatron's whose layers move samples: what links their MoE layers, which share the order of samples.

MoE layers outside a block (multi-token prediction) do not move samples.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement, SampleOrder, in_this_pass
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.block_passes import BeginPass
from megatron_moe_opt.integration.layer.layer_seam import own_method, router_of
from megatron_moe_opt.integration.layer.netmoe_layer import (
    dispatcher_of,
    let_samples_move,
    method_after_mlp,
    normalise,
    placement_of,
)
from megatron_moe_opt.integration.layer.transformer_blocks import note_block, places_in_blocks
from megatron_moe_opt.integration.micro_batches import follow_micro_batches
from megatron_moe_opt.integration.observe.netmoe_report import watch
from megatron_moe_opt.integration.patching import is_wrapped, seam_moved, wrap_once
from megatron_moe_opt.topology.group_cache import cached_by_group
from megatron_moe_opt.topology.sample_holders import SampleHolders

_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Transformer layers whose samples can move, and blocks that begin passes for them."""


def wrap_transformer_block() -> None:
    """Lets every TransformerBlock that is built from now on link its netmoe layers, now or when they change to it."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not isinstance(TransformerBlock.__dict__.get("__init__"), types.FunctionType):
        return  # check_seams says so to whom it concerns
    wrap_once(TransformerBlock, "__init__", _linking)
    wrap_once(tensor_parallel, "checkpoint", _keeping_samples)


def _linking(stock_init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    stock_init(self, *args, **kwargs)
    note_block(self)
    _link(self)


def _keeping_samples(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls Megatron's checkpoint of a function so that, recomputed, netmoe's layers in it repeat what they decided."""
    return checkpoint(in_this_pass(function), *args, **kwargs)


def check_seams() -> None:
    """Looks for what `netmoe` needs of the layers around a MoELayer.

    Raises:
        ConfigurationError: this Megatron does not have it.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if not is_wrapped(TransformerBlock.__init__):
        raise seam_moved("TransformerBlock.__init__ is not a plain method")
    for method in ("_forward_mlp", method_after_mlp()):
        if not isinstance(TransformerLayer.__dict__.get(method), types.FunctionType):
            raise seam_moved(f"TransformerLayer.{method} is not a plain method")


def link(layers: Iterable[Any]) -> None:
    """Lets samples move through MoE layers that have changed to netmoe's dispatcher, together with all other such
    layers of their blocks. In a pass in which samples must not move, because some are masked unlike others, they stay
    at home. A collective call over the layers' groups.
    """
    for block in places_in_blocks(layers):
        _link(block, stays_home=True)


def _link(block: Any, stays_home: bool = False) -> None:
    """Links the layers of a block that have netmoe's dispatcher, if they are not.

    Args:
        stays_home: see SampleOrder.
    """
    layers = [layer for layer in block.layers if dispatcher_of(layer) is not None]
    if len(layers) < 2:
        return  # the only layer would have to bring home what it moves
    if placement_of(layers[0]) is not None:
        return  # a turn of the same dispatchers again
    if not stays_home and (why := adds_up_otherwise(block)) is not None:
        raise ConfigurationError(
            f"--moe-token-dispatcher-type netmoe moves residuals with the sums of experts, and {why}: use monta"
        )
    follow_micro_batches()
    order = SampleOrder(stays_home)
    for layer in layers:
        moe = layer.mlp
        holders = _holders(dispatcher_of(layer).groups, router_of(moe).tp_cp_group)
        costs = dispatcher_of(layer).costs(holders, moe.config.num_moe_experts)
        placement = LayerPlacement(order, holders, costs, last=layer is layers[-1])
        dispatcher_of(layer).join(placement, functools.partial(normalise, weakref.ref(layer)))
        watch(dispatcher_of(layer), moe.layer_number)
        if layer not in _open:
            let_samples_move(layer)
    if block not in _open:
        block.register_forward_pre_hook(BeginPass(), with_kwargs=True)
    _open.update([block, *layers])


_OF_LAYERS = (
    "forward", "_forward_pre_mlp_layernorm", "_forward_mlp", "_forward_post_mlp",
    "_maybe_unflatten_for_moe", "_maybe_reflatten_from_moe",
    "_pre_mlp_layernorm_and_residual", "_run_mlp", "_apply_mlp_bda_step",  # from 0.20 on
)  # fmt: skip


_OF_MOE_LAYERS = (
    "forward", "shared_experts_compute", "preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess",
)  # fmt: skip
"""The methods between which the residual goes another way under `netmoe`."""


def adds_up_otherwise(block: Any) -> str | None:
    """Returns why a layer of a block does not add the residual to what its experts return, and nothing else; None: all
    of its layers with MoE do, as Megatron's own.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    for layer in block.layers:
        kind = type(layer).__name__
        if getattr(layer, "hidden_dropout", 0.0):
            return f"a {kind} has a hidden_dropout of {layer.hidden_dropout:g} of its own"
        if not hasattr(getattr(layer, "mlp", None), "token_dispatcher"):
            continue
        if getattr(layer, "mlp_bda", None) is not get_bias_dropout_add:
            return f"a {kind} has an mlp_bda of its own"
        for module, names in ((layer, _OF_LAYERS), (layer.mlp, _OF_MOE_LAYERS)):
            for name in names:
                if (own := own_method(module, name)) is not None:
                    return f"a {kind} has a {own} that is not Megatron's"
    return None


def block_adds_up_otherwise(moe_layers: Iterable[Any]) -> str | None:
    """Returns what adds_up_otherwise says of the blocks of MoE layers."""
    return next((why for one in places_in_blocks(moe_layers) if (why := adds_up_otherwise(one)) is not None), None)


@cached_by_group
def _holders(groups: Any, tp_cp_group: Any) -> SampleHolders:
    return SampleHolders.of(tp_cp_group, groups)
