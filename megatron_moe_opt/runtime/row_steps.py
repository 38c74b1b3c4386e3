"""The hops of rows, bound to tensors and groups: to the ranks of their experts, and back.

A row goes over the EP group (all-to-all), then over the expert-TP group (all-gather), and comes back the other way
round (reduce-scatter and its sum, all-to-all).
"""

from __future__ import annotations

import torch

from megatron_moe_opt.runtime import steps
from megatron_moe_opt.runtime.exchange_plan import ChunkPlan
from megatron_moe_opt.runtime.row_layout import RowLayout
from megatron_moe_opt.runtime.steps import Steps
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.expert_groups import ExpertGroups


def hop_to_experts(
    kind: Kind, rows: torch.Tensor, gathered: torch.Tensor, chunk: ChunkPlan, groups: ExpertGroups
) -> Steps:
    """rows [num_sent, W] -> gathered [num_gathered, W], at the places of the chunk in both."""
    arrived = gathered.narrow(0, chunk.first_own, sum(chunk.receive_counts))
    if kind is Kind.ALL_TO_ALL:
        sent = rows.narrow(0, chunk.first_sent, sum(chunk.send_counts))
        return steps.all_to_all(sent, chunk.send_counts, arrived, chunk.receive_counts, groups.ep)
    own = arrived if groups.ep_size > 1 else rows.narrow(0, chunk.first_sent, sum(chunk.send_counts))
    all_rows = gathered.narrow(0, chunk.first_gathered, sum(chunk.gather_counts))
    return steps.all_gather(own, all_rows, chunk.gather_counts, groups.etp)


def scatter_to_shards(unsorted: torch.Tensor, parts: torch.Tensor, chunk: ChunkPlan, groups: ExpertGroups) -> Steps:
    """Of unsorted [num_gathered, W] each expert-TP rank's own to that rank: parts [num_parts(chunk, groups), W]."""
    of_peers = unsorted.narrow(0, chunk.first_gathered, sum(chunk.gather_counts))
    return steps.scatter(of_peers, parts, chunk.gather_counts, groups.etp)


def sum_over_shards(
    unsorted: torch.Tensor,
    parts: torch.Tensor,
    summed: torch.Tensor,
    chunk: ChunkPlan,
    groups: ExpertGroups,
    layout: RowLayout,
) -> Steps:
    """The sum of the own rows in `unsorted` and the parts of the others -> summed [rows that arrived, W]."""
    of_peers = unsorted.narrow(0, chunk.first_gathered, sum(chunk.gather_counts))
    arrived = summed.narrow(0, chunk.first_received, sum(chunk.receive_counts))
    return steps.sum_scattered(of_peers, parts, arrived, chunk.gather_counts, groups.etp, layout.columns)


def num_parts(chunk: ChunkPlan, groups: ExpertGroups) -> int:
    """Rows that the other expert-TP ranks have for the sums of this one."""
    return (groups.etp_size - 1) * sum(chunk.receive_counts)


def hop_to_sources(summed: torch.Tensor, rows: torch.Tensor, chunk: ChunkPlan, groups: ExpertGroups) -> Steps:
    """summed [rows that arrived, W] -> rows [num_sent, W]."""
    arrived = summed.narrow(0, chunk.first_received, sum(chunk.receive_counts))
    back = rows.narrow(0, chunk.first_sent, sum(chunk.send_counts))
    return steps.all_to_all(arrived, chunk.receive_counts, back, chunk.send_counts, groups.ep)
