"""MoE layers under tensor parallelism without sequence parallelism, where every TP rank holds all tokens.

    split over TP -> the layer as under sequence parallelism -> AllGather over TP

(Parm, section III-B and Fig. 3b: schedule S1, "PauseMP".) Each rank routes, sends and computes its own part of the
tokens, where stock Megatron would do everything TP times over, which it refuses in training. Split and AllGather are
each other's gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError


def holds_replicated_tokens(config: Any) -> bool:
    """Whether every TP rank of a model of this configuration holds all tokens."""
    return config.tensor_model_parallel_size > 1 and not config.sequence_parallel


@contextmanager
def reading_as_sequence_parallel(config: Any) -> Iterator[None]:
    """Lets `config` say sequence parallel inside the block: its layers are built, and run, for a part of the tokens."""
    config.sequence_parallel = True
    try:
        yield
    finally:
        config.sequence_parallel = False


def split_tokens_over_tp(layer: Any) -> None:
    """Puts split and AllGather around a MoELayer that was built inside `reading_as_sequence_parallel`.

    Gradients of weights that all TP ranks hold (the router's, a shared expert's gate) are summed over TP as they arise:
    Megatron's own sum at the end of a step is for sequence-parallel models.
    """
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    group = layer.tp_group
    stock_forward = layer.forward

    @functools.wraps(stock_forward)
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _check(hidden_states, group, args, kwargs)
        part = scatter_to_sequence_parallel_region(hidden_states, group=group)
        with reading_as_sequence_parallel(layer.config):
            output, bias = stock_forward(part)
        # The gradient of the gathered tokens is the same on all ranks: each takes its part.
        return gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=group), bias

    layer.forward = forward
    for parameter in layer.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(functools.partial(_sum_over, group))


def _sum_over(group: ProcessGroup, grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def _check(hidden_states: torch.Tensor, group: ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if hidden_states.size(0) % group.size():
        raise ConfigurationError(
            f"--seq-length: the {hidden_states.size(0)} tokens of a sequence on a rank cannot be split over "
            f"--tensor-model-parallel-size {group.size()}: choose a length that it divides"
        )
    if any(argument is not None for argument in (*args, *kwargs.values())):
        raise ConfigurationError(
            "a MoE layer without --sequence-parallel takes neither padding masks nor intermediate tensors: add "
            "--sequence-parallel, or use --moe-token-dispatcher-type alltoall"
        )
