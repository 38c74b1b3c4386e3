"""Layers that are built and run for measuring, in the middle of a training run that must not notice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_moe_opt.integration.random_states import AllRandomStates


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves all that layers and random numbers change in this process as it was before the block.

    That is the states of PyTorch's and Megatron's random generators, the options that layers are built with and the
    controller of those of `auto`, the routers that Megatron replays routing in, and memory on the device.
    """
    from megatron_moe_opt.integration.registry import aside  # which imports `auto`, which measures

    routers = RouterReplay.global_router_replay_instances
    states, known = AllRandomStates(), list(routers)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # NCCL takes its buffers from what PyTorch does not hold
    try:
        with aside(), torch.enable_grad():
            yield
    finally:
        states.restore()
        routers[:] = known
        gc.collect()  # layers are in cycles, with their hooks
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
