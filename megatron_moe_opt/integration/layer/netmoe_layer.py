"""The seams of `netmoe` in Megatron: the transformer block, whose layers move samples, and the layers themselves.

Megatron's transformer layer normalises the hidden states, hands them to its MoE layer, and adds them to what comes
back. Here it hands them to the dispatcher as they are before that; where all TP ranks hold all tokens, each its part of
them. What comes back is the sum already, of other samples, and is added to zero.

The MoE layers of one block share the order of samples: a block is what a pipeline stage, or a virtual chunk of it, runs
in one go. MoE layers outside a block (multi-token prediction) do not move samples.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher
from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement, SampleOrder, in_this_pass
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.hooks_of_others import HookOfOthers, hooks_of_others
from megatron_moe_opt.integration.layer.layer_seam import own_method, router_of
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens, split_over_tp
from megatron_moe_opt.integration.micro_batches import follow_micro_batches, trains
from megatron_moe_opt.integration.observe.netmoe_report import watch
from megatron_moe_opt.integration.patching import is_wrapped, seam_moved, wrap_once
from megatron_moe_opt.topology.group_cache import cached_by_group
from megatron_moe_opt.topology.sample_holders import SampleHolders


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
    for layer in self.layers:
        if (moe := getattr(layer, "mlp", None)) is not None:
            _blocks[moe] = weakref.ref(self)
    for seen in tuple(_seeing):
        seen.watch()
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
    for method in ("_forward_mlp", _after_mlp()):
        if not isinstance(TransformerLayer.__dict__.get(method), types.FunctionType):
            raise seam_moved(f"TransformerLayer.{method} is not a plain method")


def _after_mlp() -> str:
    """Returns the name of the method that adds what a layer's MLP returned to the residual: Megatron 0.20's, or that
    of the versions before.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    renamed = "_apply_mlp_bda_step"
    return renamed if hasattr(TransformerLayer, renamed) else "_forward_post_mlp"


def _dispatcher_of(layer: Any) -> NetmoeDispatcher | None:
    plugged = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    dispatcher = getattr(plugged, "dispatcher", None)
    return dispatcher if isinstance(dispatcher, NetmoeDispatcher) else None


def placement_of(layer: Any) -> LayerPlacement | None:
    """Returns what places the samples of a transformer layer; None: they do not move under its present dispatcher."""
    dispatcher = _dispatcher_of(layer)
    return None if dispatcher is None else dispatcher.placement


_blocks: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The transformer block that each MoE layer is in."""
_seeing: weakref.WeakSet[PassesSeen] = weakref.WeakSet()
"""Those that see passes, of blocks that may be built later."""
_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Transformer layers whose samples can move, and blocks that begin passes for them."""


def link(layers: Iterable[Any]) -> None:
    """Lets samples move through MoE layers that have changed to netmoe's dispatcher, together with all other such
    layers of their blocks. In a pass in which samples must not move, because some are masked unlike others, they stay
    at home. A collective call over the layers' groups.
    """
    for block in places_in_blocks(layers):
        _link(block, stays_home=True)


def places_in_blocks(moe_layers: Iterable[Any]) -> dict[Any, list[int]]:
    """Returns the transformer blocks that MoE layers are in, in turn, and the places of each one's layers among all;
    those outside of a block have none.
    """
    places: dict[Any, list[int]] = {}
    for place, layer in enumerate(moe_layers):
        if (of_layer := _blocks.get(layer)) is not None:
            places.setdefault(of_layer(), []).append(place)
    return places


def _link(block: Any, stays_home: bool = False) -> None:
    """Links the layers of a block that have netmoe's dispatcher, if they are not.

    Args:
        stays_home: see SampleOrder.
    """
    layers = [layer for layer in block.layers if _dispatcher_of(layer) is not None]
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
        holders = _holders(_dispatcher_of(layer).groups, router_of(moe).tp_cp_group)
        costs = _dispatcher_of(layer).costs(holders, moe.config.num_moe_experts)
        placement = LayerPlacement(order, holders, costs, last=layer is layers[-1])
        _dispatcher_of(layer).join(placement, functools.partial(_normalise, weakref.ref(layer)))
        watch(_dispatcher_of(layer), moe.layer_number)
        if layer not in _open:
            _let_samples_move(layer)
    if block not in _open:
        block.register_forward_pre_hook(_Begin(), with_kwargs=True)
    _open.update([block, *layers])


def _normalise(layer: weakref.ref[Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns rows as the norm before the experts makes them, the one that the layer has now.

    No rows are not given to it: kernels of Transformer Engine's norms do not take that.
    """
    return layer().pre_mlp_layernorm(rows) if len(rows) else rows


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


_AUX_LOSS = (
    "--moe-router-load-balancing-type aux_loss balances the samples that share a rank, which are others than under "
    "stock: its gradient is another one, too; those of seq_aux_loss and global_aux_loss are stock's"
)


@cached_by_group
def _holders(groups: Any, tp_cp_group: Any) -> SampleHolders:
    return SampleHolders.of(tp_cp_group, groups)


def balances_ranks(layer: Any) -> bool:
    """Whether an auxiliary loss of a MoELayer is of the samples that share a rank."""
    return router_of(layer).get_aux_loss_coeff("aux_loss") > 0


def _let_samples_move(layer: Any) -> None:
    """Lets a transformer layer's samples move, while its dispatcher is a linked one of netmoe's."""
    moe = layer.mlp
    after_mlp = _after_mlp()
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
        _dispatcher_of(layer).hand_over(residual, learn=trains(layer))
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

        given = _named(names, args, kwargs)
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
        _dispatcher_of(layer).hand_over_beside(output)
        return None

    layer._forward_mlp, moe.shared_experts_compute = forward, beside
    setattr(layer, after_mlp, post)


def _as_experts_take_it(layer: Any, hidden_states: torch.Tensor, packed: Any) -> torch.Tensor:
    """Returns the hidden states [S, B, H] as a layer's experts take them: from megatron-core 0.19 on it makes samples
    again of those that were packed into one, [B * S, 1, H].
    """
    apart = getattr(layer, "_maybe_unflatten_for_moe", None)
    return hidden_states if apart is None else apart(hidden_states, None, packed)[0]


class PassesSeen:
    """The training passes of the blocks that MoE layers are in, under any dispatcher: could samples move in them?"""

    def __init__(self) -> None:
        self._moe_layers: list[Any] = []
        self._handles: dict[Any, Any] = {}
        """The hook on each block."""
        self._what: str | None = None
        _seeing.add(self)

    def at(self, moe_layers: Iterable[Any]) -> None:
        """Sees the passes of these layers' blocks too, of which one may be still being built: it is known when it is
        done.
        """
        self._moe_layers += moe_layers
        self.watch()

    def watch(self) -> None:
        """Sees the passes of all blocks that are known by now."""
        for block in places_in_blocks(self._moe_layers):
            if block not in self._handles:
                self._handles[block] = block.register_forward_pre_hook(self._see, with_kwargs=True)

    def take(self) -> str | None:
        """Returns what was there that would not follow samples which move, in words, and looks no more; None: nothing.

        Hooks of others count: one may change what it sees, which under `netmoe` is another tensor.
        """
        _seeing.discard(self)
        for handle in self._handles.values():
            handle.remove()
        hooks = (_reads_samples(hooks_of_others(block.layers, "layers"), stays_home=True) for block in self._handles)
        return self._what or next((what for what in hooks if what is not None), None)

    def _see(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._what is None and trains(block):
            self._what = _of_samples(block, _named(_arguments_of(type(block)), args, kwargs))


class _Begin:
    """A hook that runs before each forward pass of a block."""

    def __init__(self) -> None:
        self.masks = _Masks()
        self._hooks: list[HookOfOthers] | None = None
        """The hooks that see samples which have moved; None: no pass has begun."""

    def __call__(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks what is passed, and begins with all samples at home."""
        placement = next((one for layer in block.layers if (one := placement_of(layer)) is not None), None)
        if placement is None:
            return  # another dispatcher's turn
        order = placement.order
        given = _named(_arguments_of(type(block)), args, kwargs)
        if self._hooks is None:
            self._hooks = hooks_of_others(block.layers, "layers")
        what = _of_samples(block, given) or _reads_samples(self._hooks, order.stays_home)
        if what is None and not (order.stays_home and _balances_samples(block, given)):
            order.begin(self.masks.unlike(given.get("attention_mask")))
        elif order.stays_home:
            order.begin(True)
        else:
            raise ConfigurationError(
                f"--moe-token-dispatcher-type netmoe moves samples between ranks, and {what} would not follow: use "
                "monta"
            )


def _balances_samples(block: Any, given: Mapping[str, Any]) -> bool:
    """Whether a pass of a block has an auxiliary loss of the samples that share a rank, and several there."""
    hidden_states = given.get("hidden_states") if block.pre_process else block.input_tensor
    of_experts = (layer.mlp for layer in block.layers if placement_of(layer) is not None)
    return hidden_states.size(1) > 1 and any(map(balances_ranks, of_experts))


_OF_SAMPLES = {
    "packed_seq_params": "packed sequences",
    "context": "cross-attention to a context of each sample",
    "padding_mask": "padding masks",
    "attention_bias": "an attention bias",
    "inference_context": "inference contexts",
    "inference_params": "inference contexts",
    "extract_layer_indices": "hidden states that are returned of layers",
}
"""Arguments of TransformerBlock.forward that belong to samples, and would have to move with them."""


_ALIKE = frozenset({
    "hidden_states", "attention_mask", "context_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
    "rotary_pos_cos_sin", "sequence_len_offset", *_OF_SAMPLES,
})  # fmt: skip
"""Arguments that move by themselves, are looked at, or are alike for all samples. Any other that holds tensors may
belong to samples.
"""


def _of_samples(block: Any, given: Mapping[str, Any]) -> str | None:
    """Returns what in a pass of a block belongs to samples and would not move with them; None: nothing."""
    for name, what in _OF_SAMPLES.items():
        if given.get(name) is not None:
            return what
    for name, one in given.items():
        if name not in _ALIKE and _tensors(one):
            return f"{name} of {type(block).__name__}"
    if any(one.dim() == 4 and one.size(1) > 1 for one in _tensors(given.get("rotary_pos_emb"))):
        return "positions of each sample"
    if any(map(_replays_routing, block.layers)):
        return "routing that is recorded or replayed"
    return None


def _reads_samples(hooks: Sequence[HookOfOthers], stays_home: bool) -> str | None:
    """Returns what of the hooks on a block's layers is for the samples of their rank; None: nothing that is known.

    Nobody knows what other hooks are for, and one that only looks harms nothing: so they are named, once. Where samples
    may as well stay at home, they do.
    """
    for hook in hooks:
        if hook.distills or stays_home:
            return f"what {hook} sees"
    for hook in hooks:
        say_once("netmoe", hook.function, lambda hook=hook: (
            f"{hook} sees the samples that a rank has inside a block, which may be another rank's outside of it, and "
            "what a MoE layer returns with the residual added: use monta if it compares these with this rank's own, or "
            "changes them"
        ))  # fmt: skip
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value, in lists, tuples and dictionaries too."""
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


@functools.cache
def _arguments_of(block: type) -> tuple[str, ...]:
    """Returns the names of the arguments of a block's forward passes, in their order."""
    return tuple(inspect.signature(block.forward).parameters)[1:]


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _replays_routing(layer: Any) -> bool:
    """Whether a layer's router is told which experts the tokens of this rank go to, or says it."""
    replay = getattr(router_of(layer.mlp), "router_replay", None) if hasattr(layer.mlp, "router") else None
    return replay is not None and replay.router_replay_action is not None


class _Masks:
    """Looks at the attention mask of every pass, unless it is the one of the pass before, unchanged."""

    def __init__(self) -> None:
        self._seen: tuple[weakref.ref[torch.Tensor], int] | None = None
        """The last mask, and its version, which counts its changes."""
        self._unlike: torch.Tensor | None = None

    def unlike(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Whether a mask is another one than the causal mask, for all samples: a bool [] on its device, for which
        nobody waits here. None: there is no mask, and all is causal.

        Args:
            mask: bool [B or 1, 1, S, S], True hides; with context parallelism only rows of this rank's tokens.
        """
        if mask is None:
            return None
        seen, is_inference = self._seen, mask.is_inference()  # inference tensors do not count their changes
        if seen is None or is_inference or seen[0]() is not mask or seen[1] != mask._version:
            causal = _own_rows(mask.new_ones(mask.size(-1), mask.size(-1)).triu(1), mask.size(-2))
            self._unlike = torch.stack([(of_sample != causal).any() for of_sample in mask]).any()
            self._seen = None if is_inference else (weakref.ref(mask), mask._version)
        return self._unlike


def _own_rows(mask: torch.Tensor, number: int) -> torch.Tensor:
    """Returns the rows of a mask [S, S] of the `number` tokens that this rank has of a sample, as Megatron cuts it for
    context parallelism: of 2 cp parts the one of its rank, and the one as far from the end.
    """
    if number == mask.size(0):
        return mask
    from megatron.core import parallel_state

    parts, rank = mask.chunk(2 * mask.size(0) // number), parallel_state.get_context_parallel_rank()
    return torch.cat([parts[rank], parts[-1 - rank]])
