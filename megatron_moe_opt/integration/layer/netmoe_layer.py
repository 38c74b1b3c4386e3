"""The seams of `netmoe` in one layer of Megatron's.

Megatron's transformer layer normalises the hidden states, hands them to its MoE layer, and adds them to what comes
back. Here it hands them to the dispatcher as they are before that; where all TP ranks hold all tokens, each its part of
them. What comes back is the sum already, of other samples, and is added to zero.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher
from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.integration.layer.layer_seam import router_of
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens, split_over_tp
from megatron_moe_opt.integration.micro_batches import trains


def dispatcher_of(layer: Any) -> NetmoeDispatcher | None:
    plugged = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    dispatcher = getattr(plugged, "dispatcher", None)
    return dispatcher if isinstance(dispatcher, NetmoeDispatcher) else None


def placement_of(layer: Any) -> LayerPlacement | None:
    """Returns what places the samples of a transformer layer; None: they do not move under its present dispatcher."""
    dispatcher = dispatcher_of(layer)
    return None if dispatcher is None else dispatcher.placement


def method_after_mlp() -> str:
    """Returns the name of the method that adds what a layer's MLP returned to the residual: Megatron 0.20's, or that
    of the versions before.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    renamed = "_apply_mlp_bda_step"
    return renamed if hasattr(TransformerLayer, renamed) else "_forward_post_mlp"


def balances_ranks(layer: Any) -> bool:
    """Whether an auxiliary loss of a MoELayer is of the samples that share a rank."""
    return router_of(layer).get_aux_loss_coeff("aux_loss") > 0


def normalise(layer: weakref.ref[Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns rows as the norm before the experts makes them, the one that the layer has now.

    No rows are not given to it: kernels of Transformer Engine's norms do not take that.
    """
    return layer().pre_mlp_layernorm(rows) if len(rows) else rows


_AUX_LOSS = (
    "--moe-router-load-balancing-type aux_loss balances the samples that share a rank, which are others than under "
    "stock: its gradient is another one, too; those of seq_aux_loss and global_aux_loss are stock's"
)


def let_samples_move(layer: Any) -> None:
    """Lets a transformer layer's samples move, while its dispatcher is a linked one of netmoe's."""
    moe = layer.mlp
    after_mlp = method_after_mlp()
    forward_mlp, post_mlp, shared_experts = layer._forward_mlp, getattr(layer, after_mlp), moe.shared_experts_compute
    balances, recomputes = balances_ranks(moe), moe.moe_layer_recompute
    replicated = holds_replicated_tokens(moe.config)
    names = tuple(inspect.signature(forward_mlp).parameters)[1:]
    is_handed_over = False

    def handing_over(packed: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_handed_over
        if balances and hidden_states.size(1) > 1 and not placement_of(layer).order.stays_home:
            say_once("netmoe", "aux_loss", lambda: _AUX_LOSS)
        residual = _as_experts_take_it(layer, hidden_states, packed)
        residual = split_over_tp(residual, moe.tp_group) if replicated else residual
        dispatcher_of(layer).hand_over(residual, learn=trains(layer))
        moe.moe_layer_recompute = False  # with the norm, below: its input goes along
        is_handed_over = True
        try:
            return forward_mlp(hidden_states, *args, **kwargs)
        finally:
            moe.moe_layer_recompute = recomputes
            is_handed_over = False

    @functools.wraps(forward_mlp)
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import tensor_parallel

        given = arguments_by_name(names, args, kwargs)
        # Text generation cuts what it gives to a MoE layer (--mlp-chunks-for-prefill), and all its samples are at home.
        if given.get("inference_context") is not None or placement_of(layer) is None:
            return forward_mlp(hidden_states, *args, **kwargs)
        packed = given.get("packed_seq_params")
        if not recomputes:
            return handing_over(packed, hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and any(one.requires_grad for one in layer.pre_mlp_layernorm.parameters()):
            # As the norm's output does, with which stock's recomputation begins: what is before it may be frozen.
            hidden_states = hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_()
        return tensor_parallel.checkpoint(
            lambda hidden: handing_over(packed, hidden, *args, **kwargs), False, hidden_states
        )

    @functools.wraps(post_mlp)
    def post(mlp_output_with_bias: tuple[torch.Tensor, Any], residual: torch.Tensor, *state: Any) -> torch.Tensor:
        if is_handed_over:
            output = mlp_output_with_bias[0]
            residual = output.new_zeros(()).expand_as(output)
        return post_mlp(mlp_output_with_bias, residual, *state)

    @functools.wraps(shared_experts)
    def beside(hidden_states: torch.Tensor) -> torch.Tensor | None:
        output = shared_experts(hidden_states)
        if output is None or not is_handed_over:
            return output
        dispatcher_of(layer).hand_over_beside(output)
        return None

    layer._forward_mlp, moe.shared_experts_compute = forward, beside
    setattr(layer, after_mlp, post)


def _as_experts_take_it(layer: Any, hidden_states: torch.Tensor, packed: Any) -> torch.Tensor:
    """Returns the hidden states [S, B, H] as a layer's experts take them: from megatron-core 0.19 on it makes samples
    again of those that were packed into one, [B * S, 1, H].
    """
    apart = getattr(layer, "_maybe_unflatten_for_moe", None)
    return hidden_states if apart is None else apart(hidden_states, None, packed)[0]


def arguments_by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)
