"""Counting a sample's tokens for each expert on CUDA: the counts of the reference."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.kernels import count_routing_map
from tests import kernel_reference as reference
from tests.gpu import sized

# Samples, tokens of each, experts, experts of a token.
SIZES = {
    "no-tokens": (3, 0, 8, 2),
    "one": (1, 1, 1, 1),
    "odd": (5, 333, 7, 3),
    "many-experts": sized((4, 1000, 12_288, 8), (2, 40, 12_288, 8)),
    "many-tokens": sized((2, 70_000, 64, 8), (2, 2100, 64, 8)),
    "many-samples": sized((700, 65, 16, 2), (700, 3, 16, 2)),
}


@pytest.mark.parametrize("routing", ["uniform", "one-hot"])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(device, size, routing):
    samples, length, experts, topk = SIZES[size]
    highest = experts if routing == "uniform" else 1
    chosen = torch.randint(highest, (samples * length, topk), generator=torch.Generator().manual_seed(1))
    routing_map = torch.zeros(samples * length, experts, dtype=torch.bool).scatter_(1, chosen, True)
    expected = reference.count_routing_map(routing_map, samples)
    assert torch.equal(count_routing_map(routing_map.to(device), samples).cpu(), expected)
