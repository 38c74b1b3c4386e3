"""Rows in wire formats on CUDA: the bytes that the CPU writes, and its values where rows are of a dtype."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import sized
from tests.unit.permute_cases import DTYPES, random_map
from tests.unit.wire_cases import NARROW, assert_same_rows, filled, results_on

# tokens, hidden, experts, top-k
SHAPES = {
    "no-tokens": (0, 64, 4, 2),
    "one-element": (3, 1, 2, 1),
    "odd-hidden": (sized(300, 20), 67, 12, 3),
    "short-last-block": (sized(300, 12), 272, 12, 3),
    "common": (sized(4096, 24), 1024, 64, 8),
    "wide-rows": (sized(512, 3), 7168, 128, 8),
}


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_cpu(device, shape, dtype, wire):
    tokens, hidden, experts, topk = SHAPES[shape]
    generator = torch.Generator().manual_seed(7)
    rows = filled((tokens, hidden), dtype, generator)
    routing_map = random_map(tokens, experts, topk, generator, 0.1)
    expected = results_on(torch.device("cpu"), rows, routing_map, wire)
    for name, made in results_on(device, rows, routing_map, wire).items():
        assert_same_rows(made, expected[name])
