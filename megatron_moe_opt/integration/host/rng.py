"""Megatron's random states without a GPU: the CPU generator plays the part of the CUDA generator.

Tensor parallelism needs streams of random numbers that are shared by some ranks and distinct on others. Megatron
keeps them as states of the CUDA generator and forks into them; the same states of the CPU generator do as well.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron_moe_opt.integration.patching import replace

_of_loaders = torch.Generator()
"""What data loaders draw from that are given no generator. `torch.manual_seed` seeds it together with the CPU's."""


def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """Returns the state of the CPU generator as a byte tensor, in the place of `_get_cuda_rng_state`."""
    del device, clone
    _refuse_graph_safe(graph_safe)
    return torch.get_rng_state()


def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    """Set the CPU generator's state, in the place of `_set_cuda_rng_state`."""
    del device
    _refuse_graph_safe(graph_safe)
    torch.set_rng_state(new_state)


def _refuse_graph_safe(graph_safe: bool) -> None:
    if graph_safe:
        raise ValueError("CUDA graphs (--cuda-graph-impl) need a CUDA device: use --cuda-graph-impl none on the host")


def _manual_seed(seed: int) -> None:
    """Seeds the CPU generator alone: torch.manual_seed would call torch.cuda's seeding in turn."""
    torch.default_generator.manual_seed(int(seed))


def _seeding_loaders(manual_seed: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    """Adapts `torch.manual_seed` to seed the generator of data loaders too."""

    def seed_both(seed: int) -> torch.Generator:
        _of_loaders.manual_seed(int(seed))
        return manual_seed(seed)

    return seed_both


def _drawing_apart(init: Callable[..., None]) -> Callable[..., None]:
    """Adapts DataLoader: where it is given no generator, it and its samplers draw from the one for loaders.

    They would draw seeds and orders from the CPU's, which beside a GPU is not the one of dropout. Megatron loads data
    on one rank of a tensor-parallel group alone, whose dropout would then differ from the others'.
    """

    def draw_apart(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for one in (self, self.sampler, getattr(self.batch_sampler, "sampler", None)):
            if getattr(one, "generator", _of_loaders) is None:
                one.generator = _of_loaders

    return draw_apart


def _is_not_fork_warning(record: logging.LogRecord) -> bool:
    """Whether a record is not Megatron's warning that the CPU generator advanced inside a fork, which it gives at every
    dropout and which is expected here.
    """
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def use_host_generator() -> None:
    """Let the CPU generator stand in for the CUDA one, in torch.cuda and in Megatron's trackers. What loads data gets
    another one.
    """
    for owner in (torch.cuda, torch.cuda.random):
        replace(owner, "get_rng_state", lambda original: lambda device=None: torch.get_rng_state())
        replace(owner, "set_rng_state", lambda original: lambda state, device=None: torch.set_rng_state(state))
        replace(owner, "manual_seed", lambda original: lambda seed: _manual_seed(seed))
        replace(owner, "initial_seed", lambda original: lambda: torch.initial_seed())
    for owner in (torch, torch.random):
        replace(owner, "manual_seed", _seeding_loaders)
    replace(DataLoader, "__init__", _drawing_apart)
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    replace(random, "_get_cuda_rng_state", lambda original: get_state)
    replace(random, "_set_cuda_rng_state", lambda original: set_state)
    logging.getLogger(random.__name__).addFilter(_is_not_fork_warning)
