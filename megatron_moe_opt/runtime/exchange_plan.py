"""Who sends how many rows to whom, and where they land: pure arithmetic on agreed counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import ChunkList


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in dispatching (and, read backwards, combining) the rows of one MoE layer."""

    send_counts: list[int]
    """[ep_size] rows for each expert-parallel peer."""
    receive_counts: list[int]
    """[ep_size] rows from each expert-parallel peer."""
    gather_counts: list[int]
    """[etp_size] rows each expert-tensor-parallel peer holds after its all-to-all."""
    by_expert: ChunkList
    """From arrival order (etp rank, ep rank, local expert) to expert order (local expert, etp rank, ep rank)."""
    tokens_per_expert: torch.Tensor
    """[local experts] int64, on the CPU."""


def plan_exchange(
    counts: torch.Tensor, ep_rank: int, etp_rank: int, device: torch.device | str = "cpu"
) -> ExchangePlan:
    """Plans the exchange of the rank at (ep_rank, etp_rank).

    Args:
        counts: int64 [ep_size, etp_size, experts] on the CPU: rows each rank has for each expert. Ranks that agree
            on it arrive at plans that fit together.
        device: where the rows are.

    Returns:
        The plan of this rank. Expert-parallel rank e holds experts [e * n, (e + 1) * n), n = experts / ep_size.
    """
    ep_size, etp_size, experts = counts.shape
    local = experts // ep_size
    # [etp, ep (sender), local expert]: rows for this rank's experts, in the order they arrive.
    arriving = counts[:, :, ep_rank * local : (ep_rank + 1) * local].transpose(0, 1).contiguous()
    arrival_order = torch.arange(arriving.numel())
    return ExchangePlan(
        send_counts=counts[ep_rank, etp_rank].view(ep_size, local).sum(1).tolist(),
        receive_counts=arriving[etp_rank].sum(1).tolist(),
        gather_counts=arriving.sum((1, 2)).tolist(),
        by_expert=ChunkList.from_counts(arriving.view(-1), arrival_order.view(-1, local).T.reshape(-1), device),
        tokens_per_expert=arriving.sum((0, 1)),
    )
