"""Passes of MoE layers under our dispatchers: where the process is, and what becomes of errors raised there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_moe_opt.runtime.engine.profiler_ranges import shown_as
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.job.failure_board import told
from megatron_moe_opt.runtime.observed.layer_place import Place, enter, leave, passing


def name_passes(layer_class: type, names: Container[str]) -> None:
    """Wraps the forward method of MoELayer. Only layers with one of these dispatchers are named.

    Backward passes begin and end with the gradients of the same tensors.
    """
    stock_forward = layer_class.forward

    @functools.wraps(stock_forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dispatcher = self.config.moe_token_dispatcher_type
        if dispatcher not in names:
            return stock_forward(self, hidden_states, *args, **kwargs)
        here = Place(number_of(self), dispatcher, "recompute" if is_recomputing() else "forward")
        with passing(here), told(), shown_as(lambda: _range_of(here)), _outside_of_inference_mode():
            output = stock_forward(self, hidden_states, *args, **kwargs)
        backward, shown = replace(here, direction="backward"), ExitStack()
        ends = hidden_states.requires_grad

        def begin(_: torch.Tensor) -> None:
            enter(backward)
            if ends:  # else nobody would say when
                shown.enter_context(shown_as(lambda: _range_of(backward)))

        def end(_: torch.Tensor) -> None:
            shown.close()
            leave()

        on_gradient(output[0], begin)
        on_gradient(hidden_states, end)
        return output

    layer_class.forward = forward


@contextmanager
def _outside_of_inference_mode() -> Iterator[None]:
    """Has a pass in inference mode make ordinary tensors, without a graph: training passes use what it keeps (experts
    of other ranks), and threads write into its buffers, which do not know of the mode.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _range_of(pass_: Place) -> str:
    """Returns the name under which profilers show a pass."""
    return f"MoE layer {pass_.layer} ({pass_.dispatcher}, {pass_.direction})"


def number_of(layer: Any) -> int:
    """Returns the number of a layer in the model. Layers of multi-token prediction, which Megatron counts anew
    from 0.17 on, come last.
    """
    number = layer.layer_number or 0
    return number + (layer.config.num_layers if getattr(layer, "is_mtp_layer", False) else 0)


def repeats_numbers(config: Any) -> bool:
    """Whether `number_of` returns the same number for several layers of a model: in hybrid models Megatron counts those
    of multi-token prediction anew at each depth, and before 0.20 like others of the model.
    """
    return bool(config.mtp_num_layers) and config.is_hybrid_model


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Calls the hook when the gradient of the tensor is there."""
    if tensor.requires_grad:
        tensor.register_hook(hook)
