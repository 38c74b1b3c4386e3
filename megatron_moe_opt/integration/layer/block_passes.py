"""The passes of the blocks that MoE layers are in: what of them belongs to samples, and would not move with these."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.hooks_of_others import HookOfOthers, hooks_of_others
from megatron_moe_opt.integration.layer.layer_seam import router_of
from megatron_moe_opt.integration.layer.netmoe_layer import arguments_by_name, balances_ranks, placement_of
from megatron_moe_opt.integration.layer.transformer_blocks import places_in_blocks, unwatch, watch_for_blocks
from megatron_moe_opt.integration.micro_batches import trains
from megatron_moe_opt.integration.random_states import AllRandomStates


class PassesSeen:
    """The training passes of the blocks that MoE layers are in, under any dispatcher: could samples move in them?"""

    def __init__(self) -> None:
        self._moe_layers: list[Any] = []
        self._handles: dict[Any, tuple[RemovableHandle, ...]] = {}
        """The hooks on each block."""
        self._states: dict[Any, AllRandomStates] = {}
        """The states of random generators before the pass of each block that is under way."""
        self._what: str | None = None
        watch_for_blocks(self)

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
                begin = block.register_forward_pre_hook(self._see, with_kwargs=True)
                self._handles[block] = begin, block.register_forward_hook(self._look_back)

    def take(self) -> str | None:
        """Returns what was there that would not follow samples which move, in words, and looks no more; None: nothing.

        Hooks of others count: one may change what it sees, which under `netmoe` is another tensor.
        """
        unwatch(self)
        for handle in itertools.chain(*self._handles.values()):
            handle.remove()
        hooks = (_reads_samples(hooks_of_others(block.layers, "layers"), stays_home=True) for block in self._handles)
        return self._what or next((what for what in hooks if what is not None), None)

    def _see(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._what is not None or not trains(block):
            return
        self._what = _of_samples(block, arguments_by_name(_arguments_of(type(block)), args, kwargs))
        if self._what is None:
            self._states[block] = AllRandomStates()

    def _look_back(self, block: Any, *_: Any) -> None:
        """Dropout of adapters, of attention of one's own: no configuration says so."""
        states = self._states.pop(block, None)
        if self._what is None and states is not None and states.moved():
            self._what = "random numbers that its modules draw"


class BeginPass:
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
        given = arguments_by_name(_arguments_of(type(block)), args, kwargs)
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
