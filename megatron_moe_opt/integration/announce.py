"""The one line at start that says which dispatcher runs where."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from megatron_moe_opt.dispatchers.say import is_first_rank, say_once
from megatron_moe_opt.gpu_settings import blocking_waits, needless_queue, too_few_queues
from megatron_moe_opt.integration.layer.configured_workload import moe_layers
from megatron_moe_opt.integration.layer.layer_passes import number_of
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass
from megatron_moe_opt.options import Options
from megatron_moe_opt.row_format import SAME
from megatron_moe_opt.runtime.engine.executor import streams_in_use

_layers: list[tuple[weakref.ref[Any], str, Any, str]] = []
"""The layers built since the last line: (layer, dispatcher name, dispatcher, what else there is to say) of each."""


def announce(layer: Any, name: str, dispatcher: Any, options: Options) -> None:
    """Prints one line when the first of the layers built so far runs for the first time: on rank 0, or, where its
    pipeline stage has no MoE layer, on the first rank of the stage that has the model's first one; of every stage that
    has some, where nobody knows which is the first.

    Waiting for the first forward pass lets one line speak for all layers of the model; the layer's second pass, the
    first to know what streams a pass uses, says where these are more than hardware queues.
    """
    if not _is_first_of_stage():
        return
    more = "" if options.expert_order is None else f"; experts in the order of {options.expert_order}"
    if options.wire.of_rows(layer.config.params_dtype is torch.bfloat16) != SAME:
        more += f"; {options.wire.describe()}"
    _layers.append((weakref.ref(layer), name, dispatcher, more))

    handle = before_pass(layer, lambda *_: speak())

    def speak() -> None:
        nonlocal handle
        handle.remove()
        if _layers and _print_lines():  # else another layer has spoken for this one
            handle = before_pass(layer, lambda *_: speak_of_streams())

    def speak_of_streams() -> None:
        handle.remove()
        waits = too_few_queues(streams_in_use())
        if waits is not None:
            say_once(name, waits, lambda: waits, on_any=True)


def _is_first_of_stage() -> bool:
    from megatron.core import parallel_state

    if is_first_rank():
        return True
    if not parallel_state.model_parallel_is_initialized():
        return False
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return data_rank == parallel_state.get_tensor_model_parallel_rank() == 0


def _may_be_first(layer: Any) -> bool:
    """Whether a MoE layer is the model's first one, as far as is known."""
    layers = moe_layers(layer.config)
    return layers is None or number_of(layer) in layers[:1]


def _print_lines() -> bool:
    """Prints a line for each different dispatcher: nearly always one. Returns whether it was this rank's to do so."""
    there = [layer for reference, *_ in _layers if (layer := reference()) is not None]
    if not is_first_rank() and not any(map(_may_be_first, there)):
        _layers.clear()
        return False
    numbers: dict[tuple[str, str], list[int]] = {}
    waits = {blocking_waits()} if torch.cuda.is_available() else set()
    for reference, name, dispatcher, more in _layers:
        layer, groups = reference(), dispatcher.groups
        what = f"{name} ({dispatcher.describe()}; EP {groups.ep_size}, expert-TP {groups.etp_size}{more})"
        if layer is not None and torch.cuda.is_available():
            sizes = layer.config.tensor_model_parallel_size, layer.config.context_parallel_size
            waits.add(needless_queue(*sizes, torch.cuda.get_device_capability()[0]))
        if layer is not None:
            numbers.setdefault((name, what), []).append(number_of(layer))
    _layers.clear()
    for line in sorted(waits - {None}):
        print(f"moe-opt: {line}", flush=True)
    for (name, what), layers in numbers.items():
        listed = ", ".join(map(str, sorted(layers)))
        print(
            f"moe-opt: MoE layer{'s' * (len(layers) > 1)} {listed}: dispatcher {what}; "
            f"chosen by --moe-token-dispatcher-type {name}",
            flush=True,
        )
    return True
