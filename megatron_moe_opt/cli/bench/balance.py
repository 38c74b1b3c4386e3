"""How evenly a layer's rows are spread over its experts, and over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.topology.layouts import JOINT_ROLES, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoutingBalance:
    """Rows of one step: (token, expert) pairs as they were routed, before any is dropped for capacity."""

    of_expert: tuple[int, ...]
    """The rows that each expert gets from all ranks, [experts]."""
    of_rank: tuple[int, ...]
    """The rows that pass through the experts of each rank, [world size]; every shard of an expert sees all its rows."""


def balance(chosen: Sequence[Sequence[int]], layout: Layout) -> RoutingBalance:
    """Returns where rows go, with experts in stock's order: equally many on each EP rank, by ascending number.

    Args:
        chosen: [world size, experts] rows that each rank sends to each expert.
        layout: whose EP size divides the number of experts.
    """
    of_rank = [0] * layout.world
    held = len(chosen[0]) // layout.ep
    for group in layout.groups(*JOINT_ROLES):
        arriving = [sum(rows) for rows in zip(*(chosen[rank] for rank in group), strict=True)]
        for joint_rank, rank in enumerate(group):
            first = joint_rank // layout.expert_tp * held
            of_rank[rank] = sum(arriving[first : first + held])
    return RoutingBalance(tuple(map(sum, zip(*chosen, strict=True))), tuple(of_rank))


def routing_balance(settings: LayerSettings, device: torch.device) -> RoutingBalance:
    """Returns the balance of the settings' routing on the ranks of this run. A collective call over the world."""
    import torch
    import torch.distributed as dist

    from megatron_moe_opt.integration.measuring.workloads import choose_experts

    world, rank = dist.get_world_size(), dist.get_rank()
    experts = choose_experts(
        settings.routing,
        tokens=settings.tokens,
        experts=settings.experts,
        topk=settings.topk,
        seed=settings.seed,
        rank=settings.data_rank(rank),
    )
    if settings.replicated:  # each token counts for one of the ranks that hold it
        experts = experts.tensor_split(settings.tp)[rank % settings.tp]
    chosen = torch.zeros(world, settings.experts, dtype=torch.int64)
    chosen[rank] = experts.flatten().bincount(minlength=settings.experts)
    chosen = chosen.to(device)
    dist.all_reduce(chosen)
    return balance(chosen.tolist(), settings.layout(world))


def max_over_mean(rows: Sequence[int]) -> float:
    """Returns the largest over the mean: 1 where all have equally many, `len(rows)` where one has all."""
    return max(rows) * len(rows) / sum(rows)
