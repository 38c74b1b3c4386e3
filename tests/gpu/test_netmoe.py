"""netmoe's kernels on one GPU: samples of one rank that change their places, against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

EXPERTS, SEQUENCE, BATCH, HIDDEN, TOPK = 6, 37, 4, 48, 2
MOVE = [2, 0, 3, 1]


def permuted():
    """A placement that sends sample b of the rank to place MOVE[b]."""
    from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement, SampleOrder
    from megatron_moe_opt.planning.predicting.sample_costs import RowCosts
    from megatron_moe_opt.topology.sample_holders import SampleHolders

    holders = SampleHolders.from_ranks([0], ([0],), ("node",), 1)
    placement = LayerPlacement(SampleOrder(), holders, RowCosts(holders, EXPERTS), last=False)
    placement._solve = lambda on_device: np.array(MOVE)
    return placement


@pytest.mark.parametrize(("level", "chunks"), [("O1", 1), ("O3", 3)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_change_places(one_rank, dtype, shared, level, chunks):
    from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher
    from megatron_moe_opt.dispatchers.pipelining import FixedPipelining
    from megatron_moe_opt.topology.expert_groups import ExpertGroups

    device, group = one_rank, dist.group.WORLD
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(SEQUENCE * BATCH, EXPERTS, generator=generator)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOPK).indices, True).to(device)
    values = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(device, dtype)
    upstream = torch.randn(SEQUENCE * BATCH, HIDDEN, generator=generator).to(device, dtype)
    results = []
    for plain in (True, False):
        residual = values.clone().requires_grad_()
        probs = (scores.to(device) * routing_map).detach().requires_grad_()
        if plain:
            summed = residual * (1 + 2 * probs.view(SEQUENCE, BATCH, EXPERTS).sum(2, keepdim=True))
            summed = summed + 5 * residual if shared else summed
            output = torch.empty_like(summed)
            output[:, MOVE] = summed
            output = output.view(-1, HIDDEN)
        else:
            dispatcher = NetmoeDispatcher(ExpertGroups(group, None, group), FixedPipelining(level, chunks))
            dispatcher.join(permuted(), lambda rows: 2 * rows)
            dispatcher.hand_over(residual, learn=True)
            if shared:
                dispatcher.hand_over_beside(5 * residual)
            tokens = residual.view(-1, HIDDEN)
            packed, state = dispatcher.permute(tokens, probs, routing_map, num_rows=len(scores) * TOPK)
            rows, counts, row_probs = dispatcher.dispatch(packed, state, probs.dtype)
            assert counts.tolist() == routing_map.sum(0).tolist()
            rows = dispatcher.combine((rows * row_probs.unsqueeze(1)).to(dtype), state)
            output = dispatcher.unpermute(rows, state)
        output.to(dtype).backward(upstream)
        results.append((output.detach(), residual.grad, probs.grad * routing_map))
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for expected, got in zip(*results, strict=True):
        assert (got.float() - expected.float()).norm() <= bound * expected.float().norm()
