"""The steps of Parm's schedules: rows to all shards of their experts at once, and the sums of what the shards make.

Ranks of the joint group are in the order of (EP rank, expert-TP rank). See schedules/parm.py.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.runtime import steps
from megatron_moe_opt.runtime.exchange_plan import ChunkPlan, Parts
from megatron_moe_opt.runtime.row_layout import RowLayout
from megatron_moe_opt.runtime.steps import Blocks, Steps, blocks_of
from megatron_moe_opt.schedules import parm
from megatron_moe_opt.schedules.schedule import Op
from megatron_moe_opt.topology.expert_groups import ExpertGroups


def to_all_shards(rows: torch.Tensor, gathered: torch.Tensor, chunk: ChunkPlan, groups: ExpertGroups) -> Steps:
    """Own rows [num_sent, W] to all shards of their experts; theirs to `gathered` [num_gathered, W]."""
    sent = [block for block in blocks_of(chunk.send_counts, chunk.first_sent) for _ in range(groups.etp_size)]
    return steps.exchange(rows, sent, gathered, _arrivals(chunk, groups), groups.joint, "all_to_all")


def from_all_shards(
    unsorted: torch.Tensor,
    rows: torch.Tensor,
    chunk: ChunkPlan,
    groups: ExpertGroups,
    layout: RowLayout,
    senders: range,
    receivers: range,
    over: str = parm.JOINT,
) -> tuple[Steps, Steps]:
    """Each shard's part of every row back from it, into a copy a shard; and their sum, in rank order.

    Args:
        unsorted: [num_gathered, W], as `to_all_shards` leaves them.
        rows: [num_sent, W]; written where they come from `senders`.
        senders: EP ranks from which rows come back.
        receivers: EP ranks that get theirs.
        over: role of the group that they come over. The expert-TP group has rows of this EP rank only.
    """
    counts = [count if peer in senders else 0 for peer, count in enumerate(chunk.send_counts)]
    num_rows, first = sum(counts), chunk.first_sent + sum(chunk.send_counts[: senders.start])
    summed = rows.narrow(0, first, num_rows)
    to = _arrivals(chunk, groups)
    parts = layout.empty_rows(groups.etp_size * num_rows, rows)
    by_shard = [blocks_of(counts, shard * num_rows) for shard in range(groups.etp_size)]
    from_ = [by_shard[shard][ep_rank] for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]
    if over == parm.JOINT:
        to = [block if joint // groups.etp_size in receivers else (0, 0) for joint, block in enumerate(to)]
        step = steps.exchange(unsorted, to, parts, from_, groups.joint, "all_to_all")
    else:
        own = slice(groups.ep_rank * groups.etp_size, (groups.ep_rank + 1) * groups.etp_size)  # joint ranks
        to, from_ = to[own], from_[own]
        step = steps.exchange(unsorted, to, parts, from_, groups.etp, "reduce_scatter")
    return step, steps.sum_parts(parts.split(num_rows) if num_rows else [summed], summed, layout.columns)


def of_phase(
    op: Op,
    unsorted: torch.Tensor,
    all_rows: torch.Tensor,
    chunk: ChunkPlan,
    parts: Parts,
    groups: ExpertGroups,
    layout: RowLayout,
) -> tuple[Steps, ...]:
    """Of combine_and_gather: the rows of a phase's EP peers back from them, and their sum; or shared over the TP group.

    Args:
        unsorted: [num_gathered, W].
        all_rows: [parts.num_rows, W], this rank's part among them.
    """
    if op.group == parm.TP:
        own = parts.block(parts.group.rank(), op.chunk)
        blocks = [parts.block(rank, op.chunk) for rank in range(parts.group.size())]
        return (steps.exchange(all_rows, [own] * len(blocks), all_rows, blocks, parts.group, "all_gather"),)
    rows = all_rows.narrow(0, parts.first_own, sum(chunk.send_counts))
    if op.group is None:  # of this rank alone
        first, count = _arrivals(chunk, groups)[groups.ep_rank * groups.etp_size]
        target = rows.narrow(0, sum(chunk.send_counts[: groups.ep_rank]), count)
        return (steps.sum_parts([unsorted.narrow(0, first, count)], target, layout.columns),)
    senders, receivers = parts.peers(groups.ep_rank, op.chunk), parts.peers(groups.ep_rank, -op.chunk)
    return from_all_shards(unsorted, rows, chunk, groups, layout, senders, receivers, op.group)


def _arrivals(chunk: ChunkPlan, groups: ExpertGroups) -> Blocks:
    """For each rank of the joint group, the place of its rows among those of this rank's experts."""
    first, by_shard = chunk.first_gathered, []
    for counts in chunk.arriving_counts:
        by_shard.append(blocks_of(counts, first))
        first += sum(counts)
    return [by_shard[shard][ep_rank] for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]
