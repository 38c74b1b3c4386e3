"""The one line at start that says which dispatcher runs where."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from megatron_moe_opt.topology.expert_groups import ExpertGroups

_layers: list[tuple[weakref.ref[Any], str]] = []


def announce(layer: Any, name: str, dispatcher: Any) -> None:
    """Prints one line on rank 0 when the first of the layers built so far runs for the first time.

    Waiting for the first forward pass lets one line speak for all layers of the model.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    _layers.append((weakref.ref(layer), name))

    def speak(*_: Any) -> None:
        handle.remove()
        _print_line(dispatcher)

    handle = layer.register_forward_pre_hook(speak)


def _print_line(dispatcher: Any) -> None:
    by_name: dict[str, list[int]] = {}
    for reference, name in _layers:
        layer = reference()
        if layer is not None:
            by_name.setdefault(name, []).append(layer.layer_number or 0)
    _layers.clear()  # the hooks of the other layers find nothing left to say
    groups: ExpertGroups = dispatcher.groups
    for name, numbers in by_name.items():
        print(
            f"moe-opt: dispatcher {name} ({dispatcher.describe()}) in MoE layer{'s' * (len(numbers) > 1)} "
            f"{', '.join(map(str, sorted(numbers)))}; EP {groups.ep_size}, expert-TP {groups.etp_size}; "
            f"chosen by --moe-token-dispatcher-type {name}",
            flush=True,
        )
