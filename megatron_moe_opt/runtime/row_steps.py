"""The hops of rows, bound to tensors and groups: to the ranks of their experts, and back.

A row goes over the EP group, then over the expert-TP group, and comes back the other way round. `op` says which hop;
its kind is ALL_TO_ALL or ALL_GATHER on the way there, REDUCE_SCATTER or ALL_TO_ALL on the way back.
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


def hop_to_sources(
    kind: Kind,
    unsorted: torch.Tensor,
    summed: torch.Tensor,
    rows: torch.Tensor,
    chunk: ChunkPlan,
    groups: ExpertGroups,
    layout: RowLayout,
    parts: torch.Tensor | None = None,
) -> Steps:
    """unsorted [num_gathered, W] -> summed [rows that arrived, W], or summed -> rows [num_sent, W].

    Args:
        parts: scratch of a reduce-scatter, at least [(etp_size - 1) * the chunk's rows that arrived, W]; None: new.
    """
    num_arrived = sum(chunk.receive_counts)
    arrived = summed.narrow(0, chunk.first_received, num_arrived)
    if kind is Kind.REDUCE_SCATTER:
        of_peers = unsorted.narrow(0, chunk.first_gathered, sum(chunk.gather_counts))
        num_parts = (groups.etp_size - 1) * num_arrived
        scratch = layout.empty_rows(num_parts, unsorted) if parts is None else parts.narrow(0, 0, num_parts)
        return steps.reduce_scatter(of_peers, scratch, arrived, chunk.gather_counts, groups.etp, layout.columns)
    back = rows.narrow(0, chunk.first_sent, sum(chunk.send_counts))
    return steps.all_to_all(arrived, chunk.receive_counts, back, chunk.send_counts, groups.ep)
