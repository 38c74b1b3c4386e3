"""The combine that brings samples to other ranks than they came from (NetMoE, Fig. 2c): its plan, and autograd.

Row order. A rank's rows are grouped by expert, then sample, then in token order. At the experts a sample's rows for one
expert are one block, and blocks are what is put in another order for the combine: it leaves them by receiving rank, and
there they lie by expert, sample and token again. What the receiving rank cannot know is which tokens they are: every
row has its token's number behind it.

An identity expert on each rank, which its own samples alone have rows for, carries what is to go along without having
been dispatched.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.kernels import RowMap, row_map_from_sources, spread_rows, sum_packed_rows
from megatron_moe_opt.kernels.chunk_copy import ChunkList
from megatron_moe_opt.kernels.streams import to_device
from megatron_moe_opt.runtime.rows.exchange_plan import ChunkPlan, ExchangePlan
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, run_to_experts, run_to_sources
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.ways import way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class SampleReturn:
    """One rank's part in a combine that moves samples.

    `exchange` is to be read backwards, as a dispatch from the samples' new ranks.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        items: torch.Tensor,
        groups: ExpertGroups,
        shape: tuple[int, int],
        carried: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            counts: int64 [ep_size, etp_size, B, experts] on the CPU, rows of each part of a sample for each expert.
            items: int64 [ep_size * etp_size * B] where each part goes, see SampleHolders.items; a permutation. Ranks
                with fewer than B samples, which have none in their last places, keep what they have.
            shape: tokens of a part, and samples, that this rank will have.
            carried: int64 [ep_size, etp_size, B] rows of each part for its identity expert; None: there is none.
            device: where the rows are.
        """
        counts = _by_expert_rank(counts, groups.ep_size, carried)
        self.shape = shape
        moved = torch.empty_like(counts.flatten(0, 2))
        moved[items] = counts.flatten(0, 2)
        moved = moved.view_as(counts)
        arriving = moved[:, :, :, groups.ep_rank].permute(1, 0, 3, 2).contiguous()  # [etp, ep, local, B]
        # Blocks in arrival order are numbered; experts have them by local expert and where they came from.
        numbers = torch.arange(arriving.numel()).view_as(arriving).permute(1, 0, 3, 2)  # [ep, etp, B, local]
        at_source = numbers.flatten(0, 2)[items].view_as(numbers)
        by_expert = ChunkList.from_counts(arriving.view(-1), at_source.permute(3, 1, 0, 2).reshape(-1), device)
        own = moved[groups.ep_rank, groups.etp_rank].permute(1, 2, 0)  # [ep, local, B]
        chunk = ChunkPlan(own.sum((1, 2)).tolist(), arriving.sum((2, 3)).tolist(), groups.etp_rank, by_expert, 0, 0, 0)
        plan = ExchangePlan((chunk,), arriving.sum((0, 1, 3)), arrives_sorted=False)
        self.exchange = Exchange(way_of(groups, "O1"), plan)
        blocks = torch.stack([own.reshape(-1), torch.arange(own.size(2)).repeat(own.size(0) * own.size(1))])
        blocks = to_device(blocks, device)
        self.slots = blocks[1].repeat_interleave(blocks[0], output_size=plan.num_sent)
        """[rows] which of this rank's samples each row will belong to."""


def _by_expert_rank(counts: torch.Tensor, ep_size: int, identity_rows: torch.Tensor | None) -> torch.Tensor:
    """[ep, etp, B, experts] -> [ep, etp, B, ep of the expert, local experts and, where there is one, the identity]."""
    counts = counts.view(*counts.shape[:3], ep_size, -1)
    if identity_rows is None:
        return counts
    ranks = torch.arange(ep_size)
    identity = counts.new_zeros(*counts.shape[:4], 1)
    identity[ranks, :, :, ranks] = identity_rows.unsqueeze(3)
    return torch.cat([counts, identity], dim=4)


def to_new_homes(rows: torch.Tensor, tokens: torch.Tensor, way: SampleReturn) -> torch.Tensor:
    """Expert outputs to the ranks where their samples will be, summed there by token. Differentiable.

    Args:
        rows: [N, H], sorted by local expert (the identity expert last) and source, as experts have them.
        tokens: float32 [N], which token of its part of a sample each row is; zero on all expert-TP ranks but one.

    Returns:
        [S * B, H], token s of sample b in row s * B + b; rows are added in the order of experts, in float32.
    """
    hidden, (sequence, batch) = rows.size(1), way.shape
    row_map: RowMap | None = None

    def there(rows: torch.Tensor) -> torch.Tensor:
        nonlocal row_map
        packed = run_to_sources(rows.contiguous(), tokens, way.exchange)
        row_map = _row_map(packed, hidden, way.slots, sequence, batch)
        return sum_packed_rows(packed, hidden, row_map)

    def back(grad: torch.Tensor) -> torch.Tensor:
        return run_to_experts(spread_rows(grad.contiguous(), row_map), way.exchange, None)[0]

    return linear(rows, there, back)


def _row_map(packed: torch.Tensor, hidden: int, slots: torch.Tensor, sequence: int, batch: int) -> RowMap:
    lane = packed[:, hidden:].contiguous().view(torch.float32)[:, 0]
    return row_map_from_sources(lane.to(torch.int64) * batch + slots, sequence * batch)
