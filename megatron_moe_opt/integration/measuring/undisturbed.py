"""Layers that are built and run for measuring, in the middle of a training run that must not notice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.router_replay import RouterReplay


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves all that layers and random numbers change in this process as it was before the block.

    That is the states of PyTorch's and Megatron's random generators, the options that layers are built with and the
    controller of those of `auto`, the routers that Megatron replays routing in, and memory on the device.
    """
    from megatron_moe_opt.integration.registry import aside  # which imports `auto`, which measures

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    tracker, routers = get_cuda_rng_tracker(), RouterReplay.global_router_replay_instances
    states, known = tracker.get_states(), list(routers)
    # Of CUDA graphs that draw random numbers the tracker holds generators, and their states are in these.
    drawn = {one: one.get_state() for one in states.values() if isinstance(one, torch.Generator)}
    if devices:
        torch.cuda.empty_cache()  # NCCL takes its buffers from what PyTorch does not hold
    try:
        with aside(), torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        tracker.set_states(states)
        for generator, state in drawn.items():
            generator.set_state(state)
        routers[:] = known
        gc.collect()  # layers are in cycles, with their hooks
        if devices:
            torch.cuda.empty_cache()
