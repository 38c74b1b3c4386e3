"""Layers whose stages Megatron calls itself (--overlap-moe-expert-parallel-comm).

Its schedule plan runs the dispatch and combine of one micro-batch beside the computation of another: each stage is a
node with an autograd graph of its own, those that communicate on a stream of their own. MoELayer.forward is not called.
So what belongs to a pass of a layer begins where it routes (not with its router: what is put around that, as LoRA is,
need not call it); every tensor that goes from one stage to the next must get a gradient; a node frees its input where
it believes that backward does not need it. What a stage has noted for the next ones is used on another stream than the
one it was made on, and is held until that stage's own backward pass, which is behind theirs; rows on the wire are not
(runtime/rows/wire_rows.py).
"""

from __future__ import annotations

import copy
import importlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron_moe_opt.integration.layer.layer_passes import number_of
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot
from megatron_moe_opt.integration.patching import seam_moved, wrap_once
from megatron_moe_opt.runtime.observed.layer_place import Place, enter

_as_stock: dict[int, weakref.ref[Any]] = {}
"""The configurations all of whose layers run stock's `alltoall`, though it is not what they name, by their id."""
_PLANS = ("megatron.core.models.common.utils", "megatron.core.models.gpt.fine_grained_callables")
"""The modules in which Megatron says what a node frees: the first from 0.19 on."""


def overlaps_batches(config: Any) -> bool:
    """Whether Megatron calls the stages of this configuration's layers in training."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def before_pass(layer: Any, hook: Callable[..., None]) -> RemovableHandle:
    """Has `hook(layer, inputs)` called before each forward pass of a layer. The first of the inputs are its tokens.

    Returns:
        A handle that removes it.
    """
    if not overlaps_batches(layer.config):
        return layer.register_forward_pre_hook(hook)
    seam = LayerSeam(layer)
    if seam.get(LayerSlot.ROUTE) is None:
        seam.put(LayerSlot.ROUTE, _Route(layer))
    return seam.get(LayerSlot.ROUTE).begin_with(hook)


class _Route:
    """MoELayer.route of one layer, with hooks before it."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._route = layer, LayerSeam(layer).stock(LayerSlot.ROUTE)
        self._hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def begin_with(self, hook: Callable[..., None]) -> RemovableHandle:
        """Has a hook called before each call. Returns a handle that removes it."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for hook in list(self._hooks.values()):  # some remove themselves
            hook(self._layer, (hidden_states,))
        return self._route(self._layer, hidden_states, *args, **kwargs)


def name_batches(layer: Any, dispatcher: str) -> None:
    """Has messages of failures say which layer's pass came last."""

    def note(*_: Any) -> None:
        enter(Place(number_of(layer), dispatcher, "forward", is_inside=False))

    before_pass(layer, note)


def note_stock(config: Any, runs: bool) -> None:
    """Notes whether all layers of a configuration run stock's `alltoall`, whatever dispatcher it names: `auto` does."""
    if runs:
        _as_stock[id(config)] = weakref.ref(config)
    else:
        _as_stock.pop(id(config), None)


def _runs_stock(config: Any) -> bool:
    noted = _as_stock.get(id(config))
    return noted is not None and noted() is config


def keep_expert_inputs(names: Container[str]) -> None:
    """Has schedule plans keep the inputs of experts, which backward needs, under the dispatchers of these names, unless
    `note_stock` says that stock's runs.

    Stock's `alltoall` copies what arrives to sort it, and Megatron frees what had arrived; ours has sorted it already.
    With one expert a rank nothing is sorted, and Megatron keeps it too (from 0.17 on), where `alltoall` is named.

    Raises:
        ConfigurationError: a Megatron that decides elsewhere what is freed.
    """
    for module_name in _PLANS:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        if "should_free_input" in vars(module):
            break
    else:
        raise seam_moved(f"none of {', '.join(_PLANS)} has should_free_input")

    def keeping(stock: Callable[..., bool], name: str, is_moe: bool, config: Any, *args: Any, **kwargs: Any) -> bool:
        if name == "mlp" and config.moe_token_dispatcher_type in names:
            if not _runs_stock(config):
                return False
            config = copy.copy(config)
            config.moe_token_dispatcher_type = "alltoall"
        return stock(name, is_moe, config, *args, **kwargs)

    wrap_once(module, "should_free_input", keeping)


def edge_of(probs: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without elements in the graph of the probabilities: what a stage hands on beside the
    packed rows, which hold these.
    """
    return probs.reshape(-1)[:0].clone()  # memory of its own: Megatron frees it


def with_edge(probs: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """Returns the probabilities in such a way that their gradient gives the edge one, too."""
    return probs + edge.sum()
