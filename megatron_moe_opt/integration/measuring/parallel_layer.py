"""Megatron's groups around a layer that runs by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def parallel_layer(tp: int, ep: int, expert_tp: int, seed: int, cp: int = 1) -> Iterator[None]:
    """Makes Megatron's groups of these sizes, and sets its seeds, in the block. A collective call over the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
    )
    try:
        model_parallel_cuda_manual_seed(seed)
        yield
        dist.barrier()  # see topology.process_groups.temporary_groups
    finally:
        parallel_state.destroy_model_parallel()
