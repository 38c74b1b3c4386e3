"""How many tokens of each sample go to each expert: what the placement of samples is decided on (NetMoE, eq. 2)."""

from __future__ import annotations

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams

_C = load_extension()


def count_routing_map(routing_map: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Counts num[i, e], the tokens of sample i for expert e, from a routing map.

    Shapes: I samples of L tokens, E experts. Token l of sample i is row l * I + i of the map, as in Megatron-Core's
    [sequence, batch, hidden].

    Args:
        routing_map: bool [I * L, E], contiguous; on CPU or CUDA.
        num_samples: I.

    Returns:
        int64 [I, E] on the same device.

    Raises:
        ValueError: another shape, layout or dtype, rows that I does not divide.
    """
    if not has_streams(routing_map.device):
        return _C.count_routing_map(routing_map, num_samples)
    shape = tuple(routing_map.shape)
    if routing_map.dtype != torch.bool or len(shape) != 2 or not routing_map.is_contiguous():
        raise ValueError(f"routing_map must be a contiguous bool matrix, but is {routing_map.dtype} of shape {shape}")
    if num_samples < 1 or shape[0] % num_samples:
        raise ValueError(f"routing_map of shape {shape} cannot be cut into {num_samples} samples of equal length")
    return routing_map.view(shape[0] // num_samples, num_samples, shape[1]).sum(0)
