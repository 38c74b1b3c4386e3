"""Who sends how many rows to whom, chunk by chunk, and where they land: pure arithmetic on agreed counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import ChunkList
from megatron_moe_opt.kernels.row_map import cut_counts


@dataclass(frozen=True)
class ChunkPlan:
    """One rank's part in moving one chunk of the rows of a MoE layer."""

    send_counts: list[int]
    """[ep_size] rows for each expert-parallel peer."""
    arriving_counts: list[list[int]]
    """[etp_size][ep_size] rows of each rank for this rank's experts."""
    etp_rank: int
    by_expert: ChunkList
    """From arrival order (chunk, etp rank, ep rank, local expert) to expert order (local expert, etp rank, ep rank,
    chunk), in rows of the whole layer."""

    @property
    def receive_counts(self) -> list[int]:
        """[ep_size] rows from each expert-parallel peer."""
        return self.arriving_counts[self.etp_rank]

    @property
    def gather_counts(self) -> list[int]:
        """[etp_size] rows each expert-tensor-parallel peer holds after its all-to-all."""
        return [sum(counts) for counts in self.arriving_counts]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in dispatching (and, read backwards, combining) the rows of one MoE layer."""

    chunks: tuple[ChunkPlan, ...]
    tokens_per_expert: torch.Tensor
    """[local experts] int64, on the CPU."""

    @property
    def num_sent(self) -> int:
        """Rows this rank has."""
        return sum(sum(chunk.send_counts) for chunk in self.chunks)

    @property
    def num_gathered(self) -> int:
        """Rows this rank's experts get."""
        return sum(sum(chunk.gather_counts) for chunk in self.chunks)

    @property
    def arrives_sorted(self) -> bool:
        """Whether arrival order is expert order: one chunk for one local expert."""
        return len(self.chunks) == 1 and self.tokens_per_expert.numel() == 1


def plan_exchange(
    counts: torch.Tensor, ep_rank: int, etp_rank: int, num_chunks: int = 1, device: torch.device | str = "cpu"
) -> ExchangePlan:
    """Plans the exchange of the rank at (ep_rank, etp_rank).

    Args:
        counts: int64 [ep_size, etp_size, experts] on the CPU: rows each rank has for each expert. Ranks that agree
            on it, and on num_chunks, arrive at plans that fit together.
        num_chunks: each rank's rows for each expert are cut into so many parts, as equal as whole rows allow; chunk c
            is part c of all of them. Rows must lie as `RowMap.cut(num_chunks)` has them.
        device: where the rows are.

    Returns:
        The plan of this rank. Expert-parallel rank e holds experts [e * n, (e + 1) * n), n = experts / ep_size.
    """
    ep_size, etp_size, experts = counts.shape
    local = experts // ep_size
    cut = cut_counts(counts, num_chunks)  # [chunk, ep, etp, expert]
    # [chunk, etp, ep (sender), local expert]: rows for this rank's experts, in the order they arrive.
    arriving = cut[..., ep_rank * local : (ep_rank + 1) * local].transpose(1, 2).contiguous()
    arrival_order = torch.arange(arriving.numel()).view(num_chunks, -1, local)
    by_expert = ChunkList.from_counts(arriving.view(-1), arrival_order.permute(2, 1, 0).reshape(-1), device)
    send_counts = cut[:, ep_rank, etp_rank].view(num_chunks, ep_size, local).sum(2).tolist()
    arriving_counts = arriving.sum(3).tolist()
    parts = by_expert.split(arriving.sum((1, 2, 3)).tolist())
    chunks = (
        ChunkPlan(sent, arrives, etp_rank, part)
        for sent, arrives, part in zip(send_counts, arriving_counts, parts, strict=True)
    )
    return ExchangePlan(tuple(chunks), arriving.sum((0, 1, 2)))
