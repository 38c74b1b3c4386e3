"""How many tokens of each sample go to each expert: what the placement of samples is decided on (NetMoE, eq. 2).

Shapes: I samples of L tokens, E experts, K experts of a token. The rows of a routing are the tokens of all samples:
token l of sample i is row l * I + i, as in Megatron-Core's [sequence, batch, hidden], or, with `batch_first`, row
i * L + l.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.kernels.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams

_C = load_extension()


def count_topk(experts: torch.Tensor, num_experts: int, num_samples: int, *, batch_first: bool = False) -> torch.Tensor:
    """Counts num[i, e], the tokens of sample i for expert e, from the experts of each token.

    Args:
        experts: int64 [I * L, K], contiguous; on CPU or CUDA.
        num_experts: E; on CUDA at most 12288.
        num_samples: I.
        batch_first: which rows are a sample's, see above.

    Returns:
        int64 [I, E] on the same device.

    Raises:
        ValueError: another shape, layout or dtype, rows that I does not divide, an expert outside [0, E) (on CUDA an
            assertion on the device).
    """
    if has_streams(experts.device) and experts.numel() > 0:
        torch._assert_async(((experts >= 0) & (experts < num_experts)).all(), "experts out of range")
    return _C.count_topk(experts, num_experts, num_samples, batch_first)


def count_routing_map(routing_map: torch.Tensor, num_samples: int, *, batch_first: bool = False) -> torch.Tensor:
    """Counts num[i, e], the tokens of sample i for expert e, from a routing map.

    Args:
        routing_map: bool [I * L, E], contiguous; on CPU or CUDA.
        num_samples: I.
        batch_first: which rows are a sample's, see above.

    Returns:
        int64 [I, E] on the same device.

    Raises:
        ValueError: another shape, layout or dtype, rows that I does not divide.
    """
    return _C.count_routing_map(routing_map, num_samples, batch_first)
