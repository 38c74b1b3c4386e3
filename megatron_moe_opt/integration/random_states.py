"""The states of Megatron's random generators besides PyTorch's own."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_moe_opt.runtime.engine.random_states import RandomStates


class AllRandomStates(RandomStates):
    """The states of PyTorch's generators and those in Megatron's tracker."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked = get_cuda_rng_tracker().get_states()
        generators = [one for one in self._tracked.values() if isinstance(one, torch.Generator)]
        self._drawn = {one: one.get_state() for one in generators}
        """Of CUDA graphs that draw random numbers the tracker holds generators, and their states are in these."""

    def numbers(self) -> list[torch.Tensor]:
        """Returns the states as tensors, always in the same order."""
        return super().numbers() + [self._drawn.get(one, one) for one in self._tracked.values()]

    def restore(self) -> None:
        """Sets the generators to these states."""
        super().restore()
        get_cuda_rng_tracker().set_states(dict(self._tracked))  # which the tracker changes
        for generator, state in self._drawn.items():
            generator.set_state(state)
