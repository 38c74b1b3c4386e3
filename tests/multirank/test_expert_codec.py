"""Compressed experts and their shared expert, without a layer: the very bits that every rank must hold."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_moe_opt.runtime.travelling_experts.expert_codec import TrackedExperts, kept_entries
from megatron_moe_opt.runtime.travelling_experts.mean_expert import MeanExpert

LOCAL, RATIO = 2, 8.0
NUMEL = 1003
"""The elements of an expert: no multiple of the ranks."""


def of_all_ranks(experts: torch.Tensor) -> torch.Tensor:
    """Gathers the experts of all ranks, [ranks, LOCAL, NUMEL]."""
    gathered = [torch.empty_like(experts) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, experts)
    return torch.stack(gathered)


def mean_of(experts: torch.Tensor) -> torch.Tensor:
    """Returns the mean of experts [ranks, LOCAL, NUMEL], in rank order: float32 [NUMEL]."""
    return sum(of_rank.float().sum(0) / (len(experts) * LOCAL) for of_rank in experts)


def one_message(expert: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Returns what is held of an expert after a message, where `base` was held before it."""
    residual = expert.float() - base.float()
    ranking = residual.abs().sort(descending=True, stable=True).indices
    places = ranking[: kept_entries(expert.numel(), expert.dtype, RATIO)]
    held = base.clone()
    held[places] = (base.float()[places] + residual[places].to(expert.dtype).float()).to(expert.dtype)
    return held


def follow(dtype: torch.dtype, interval: int) -> None:
    """Sends six messages and, after a restart, as many again: what is held is what the rules say, bit for bit."""
    group, rank = dist.new_group(), dist.get_rank()
    shared = MeanExpert(LOCAL, group, interval)
    codec = TrackedExperts(LOCAL, RATIO, shared)
    generator = torch.Generator().manual_seed(rank)
    experts = torch.randn(LOCAL, NUMEL, generator=generator).to(dtype)
    try:
        for _ in range(2):
            decoded = renewed = None
            for number in range(6):
                owners = of_all_ranks(experts)
                if number == 0:
                    mean = mean_of(owners)
                    expected = mean.to(dtype).expand_as(owners).clone()
                elif renewed is not None:
                    expected = expected + (renewed - mean).to(dtype)
                    mean = renewed
                renewed = mean_of(owners) if number and number % interval == 0 else None
                for places in ((owner, local) for owner in range(len(owners)) for local in range(LOCAL)):
                    expected[places] = one_message(owners[places], expected[places])
                before = decoded
                message = codec.prepare(experts.reshape(-1), lambda held=before: held)
                message.write()
                decoded = message.decode(of_all_ranks(message.sent), rank)
                decoded[rank] = codec._held.experts
                assert torch.equal(decoded.view_as(expected), expected), (dtype, interval, number)
                experts = (experts + 0.02 * torch.randn(LOCAL, NUMEL, generator=generator)).to(dtype)
            codec.restart()
    finally:
        dist.destroy_process_group(group)


def follow_all() -> None:
    """Runs the cases of `follow`."""
    follow(torch.float32, 1)
    follow(torch.bfloat16, 3)


def test_what_is_held_follows_the_shared_expert(ranks):
    ranks.run(follow_all)
