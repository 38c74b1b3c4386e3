"""The combine that brings samples to other ranks than they came from (NetMoE, Fig. 2c): its plan, and autograd.

Row order. A rank's rows are grouped by expert, then sample, then in token order. At the experts a sample's rows for one
expert are one block, and blocks are what is put in another order for the combine: it leaves them by receiving rank, and
there they lie by expert, sample and token again. What the receiving rank cannot know is which tokens they are: every
row has its token's number behind it. In several chunks each receiving rank's rows for each expert are cut into parts,
as those of a dispatch are (`cut_counts`), and blocks where a cut goes through them.

An identity expert on each rank, which its own samples alone have rows for, carries what is to go along without having
been dispatched. Where it is not to go with the rows, `move_samples` takes it in an exchange of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_moe_opt.kernels import RowMap, row_map_from_sources
from megatron_moe_opt.kernels.chunk_copy import ChunkList
from megatron_moe_opt.kernels.row_map import cut_counts
from megatron_moe_opt.kernels.streams import to_device
from megatron_moe_opt.runtime.engine.collectives import all_to_all_rows
from megatron_moe_opt.runtime.rows.exchange_plan import ChunkPlan, ExchangePlan
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, run_to_experts, run_to_sources
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.own_rows import PermutedRows
from megatron_moe_opt.runtime.rows.ways import Way
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class SampleReturn:
    """One rank's part in a combine that moves samples.

    `exchange` is to be read backwards, as a dispatch from the samples' new ranks.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        items: torch.Tensor,
        way: Way[ExchangePlan],
        num_chunks: int,
        shape: tuple[int, int],
        carried: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            counts: int64 [ep_size, etp_size, B, experts] on the CPU, rows of each part of a sample for each expert.
            items: int64 [ep_size * etp_size * B] where each part goes, see SampleHolders.items; a permutation. Ranks
                with fewer than B samples, which have none in their last places, keep what they have.
            way: that rows go, in so many chunks.
            shape: tokens of a part, and samples, that this rank will have.
            carried: int64 [ep_size, etp_size, B] rows of each part for its identity expert; None: there is none.
            device: where the rows are.
        """
        groups = way.groups
        counts = _by_expert_rank(counts, groups.ep_size, carried)
        self.shape = shape
        moved = torch.empty_like(counts.flatten(0, 2))
        moved[items] = counts.flatten(0, 2)
        moved = moved.view_as(counts)
        # Blocks, or parts of them, in arrival order are numbered; experts have them by local expert, where they came
        # from, and chunk.
        arriving = _cut(moved[:, :, :, groups.ep_rank].permute(1, 0, 3, 2), num_chunks)  # [chunk, etp, ep, local, B]
        numbers = torch.arange(arriving.numel()).view_as(arriving).permute(2, 1, 4, 3, 0)  # [ep, etp, B, local, chunk]
        at_source = numbers.flatten(0, 2)[items].view_as(numbers)
        by_expert = ChunkList.from_counts(arriving.view(-1), at_source.permute(3, 1, 0, 2, 4).reshape(-1), device)
        own = _cut(moved[groups.ep_rank, groups.etp_rank].permute(1, 2, 0), num_chunks)  # [chunk, ep, local, B]
        self.exchange = Exchange(way, _plan(own, arriving, by_expert, groups.etp_rank))
        # In the order of experts and samples, whatever the chunks: where rows lie, and which sample they will be of.
        rows, slots = own.permute(1, 2, 3, 0).reshape(-1), torch.arange(own.size(3)).repeat_interleave(num_chunks)
        lies = (own.view(-1).cumsum(0) - own.view(-1)).view_as(own).permute(1, 2, 3, 0).reshape(-1)
        shift = lies - (rows.cumsum(0) - rows)
        blocks = to_device(torch.stack([rows, slots.repeat(len(rows) // len(slots)), shift]), device)
        num_rows = self.exchange.plan.num_sent
        self._slots, shifts = (of.repeat_interleave(blocks[0], output_size=num_rows) for of in blocks[1:])
        self._rows = None if num_chunks == 1 else torch.arange(num_rows, device=device) + shifts

    def row_map(self, tokens: torch.Tensor) -> RowMap:
        """Returns which rows that came back are whose; a token's in the order of its experts, whatever the chunks.

        Args:
            tokens: int64 [rows], which token of its part of a sample each is.
        """
        sequence, batch = self.shape
        in_order = tokens if self._rows is None else tokens[self._rows]
        row_map = row_map_from_sources(in_order * batch + self._slots, sequence * batch)
        return (
            row_map if self._rows is None else dataclasses.replace(row_map, rows=self._rows[row_map.rows], sources=None)
        )


def _by_expert_rank(counts: torch.Tensor, ep_size: int, identity_rows: torch.Tensor | None) -> torch.Tensor:
    """Returns counts [ep, etp, B, experts] by the EP rank of the expert: [ep, etp, B, ep of the expert, local experts
    and, where there is one, the identity].
    """
    counts = counts.view(*counts.shape[:3], ep_size, -1)
    if identity_rows is None:
        return counts
    ranks = torch.arange(ep_size)
    identity = counts.new_zeros(*counts.shape[:4], 1)
    identity[ranks, :, :, ranks] = identity_rows.unsqueeze(3)
    return torch.cat([counts, identity], dim=4)


def _cut(blocks: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Cuts rows of blocks that lie one behind the other, int64 [..., B], to [num_chunks, ..., B], contiguous."""
    ends = blocks.cumsum(-1)
    bounds = cut_counts(ends[..., -1:], num_chunks).cumsum(0)
    upto = ends.minimum(torch.cat([torch.zeros_like(bounds[:1]), bounds]))  # rows of no block behind, and no chunk
    return upto.diff(dim=0).diff(dim=-1, prepend=torch.zeros_like(bounds)).contiguous()


def _plan(own: torch.Tensor, arriving: torch.Tensor, by_expert: ChunkList, etp_rank: int) -> ExchangePlan:
    """Plans the exchange from the rows that this rank will get, own: [chunk, ep, local, B], and those that arrive here
    to be sent there, arriving: [chunk, etp, ep, local, B].
    """
    sent, arrives = own.sum((2, 3)), arriving.sum((3, 4))  # [chunk, ep], [chunk, etp, ep]
    sizes = torch.stack([sent.sum(1), arrives[:, etp_rank].sum(1), arrives.sum((1, 2))], dim=1)
    firsts = (sizes.cumsum(0) - sizes).tolist()
    chunks = zip(sent.tolist(), arrives.tolist(), by_expert.split(sizes[:, 2].tolist()), firsts, strict=True)
    plans = (ChunkPlan(to, from_, etp_rank, blocks, *first) for to, from_, blocks, first in chunks)
    return ExchangePlan(tuple(plans), arriving.sum((0, 1, 2, 4)), arrives_sorted=False)


def to_new_homes(rows: torch.Tensor, tokens: torch.Tensor, way: SampleReturn) -> torch.Tensor:
    """Sends expert outputs to the ranks where their samples will be, summed there by token. Differentiable.

    Args:
        rows: [N, H], sorted by local expert (the identity expert last) and source, as experts have them.
        tokens: float32 [N], which token of its part of a sample each row is; zero on all expert-TP ranks but one.

    Returns:
        [S * B, H], token s of sample b in row s * B + b; rows are added in the order of experts, in float32.
    """
    by = way.exchange.way
    homes: PermutedRows | None = None

    def there(rows: torch.Tensor) -> torch.Tensor:
        nonlocal homes
        packed = run_to_sources(rows.contiguous(), tokens, way.exchange)
        lane = by.homebound(torch.float32).numbers_of_lane(packed, 0, 4, torch.float32)[:, 0]
        homes = PermutedRows(way.row_map(lane.to(torch.int64)), by.payload, torch.float32)
        return homes.sums(packed)

    def back(grad: torch.Tensor) -> torch.Tensor:
        return run_to_experts(homes.spread(grad.contiguous()), way.exchange, None)[0]

    return linear(rows, there, back)


def move_samples(samples: torch.Tensor, items: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Sends samples as they are, in their dtype, from the ranks that have them to those where they will be.
    Differentiable; a collective call over the joint group, unless all stay.

    Args:
        samples: [S, B, H], of this rank's parts.
        items: int64 [joint size * B], see SampleReturn.

    Returns:
        [S, B, H] of the parts that come here.
    """
    if torch.equal(items, torch.arange(len(items))):
        return samples
    world, batch = groups.joint_size, samples.size(1)
    rank = groups.ep_rank * groups.etp_size + groups.etp_rank
    mine = slice(rank * batch, (rank + 1) * batch)
    to, from_ = items[mine], items.argsort()[mine] // batch  # places of own parts; ranks of those that come, by slot
    leave, arrive = to.argsort(), from_.argsort(stable=True)  # each rank's parts by where they go to: in order there
    counts = [torch.bincount(ranks, minlength=world).tolist() for ranks in (to // batch, from_)]

    def moved(parts: torch.Tensor, leave: torch.Tensor, arrive: torch.Tensor, sent: Any, come: Any) -> torch.Tensor:
        sent_parts = parts.transpose(0, 1)[to_device(leave, parts.device)]
        came = all_to_all_rows(sent_parts, come, sent, groups.joint)
        return came[to_device(arrive.argsort(), parts.device)].transpose(0, 1)

    return linear(
        samples,
        lambda parts: moved(parts, leave, arrive, *counts),
        lambda grad: moved(grad, arrive, leave, *reversed(counts)),
    )
