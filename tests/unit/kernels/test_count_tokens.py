"""Counts of a sample's tokens for each expert, against the plain-PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import count_routing_map
from tests import kernel_reference as reference

LENGTHS = [0, 1, 3, 7, 100, 255, 256, 700]


@settings(max_examples=150)
@given(st.integers(1, 9), st.sampled_from(LENGTHS), st.integers(1, 70), st.integers(0, 2**31))
def test_counts(samples, length, experts, seed):
    routing_map = torch.rand(samples * length, experts, generator=torch.Generator().manual_seed(seed)) < 0.3
    assert torch.equal(count_routing_map(routing_map, samples), reference.count_routing_map(routing_map, samples))


def test_which_rows_are_a_sample_s():
    # Two samples of two tokens; expert = row.
    assert count_routing_map(torch.eye(4, dtype=torch.bool), 2).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("byte", [1, 2, 128, 255])
def test_any_byte_but_zero_is_routed_once(byte):
    """Bytes count as in build_row_map, which the same map is permuted by."""
    routing_map = torch.full((300, 3), byte, dtype=torch.uint8).view(torch.bool)
    assert count_routing_map(routing_map, 1).tolist() == [[300] * 3]
    assert count_routing_map(routing_map, 1).tolist() == [kernels.build_row_map(routing_map).expert_counts.tolist()]


def test_one_hot_expert_wide_maps_and_many_tokens():
    """Counts above a byte, and columns above a tile of the byte sums."""
    routing_map = torch.zeros(3 * 1000, 1500, dtype=torch.bool)
    routing_map[:, 1499] = True
    counts = count_routing_map(routing_map, 3)
    assert counts[:, 1499].tolist() == [1000] * 3 and int(counts.sum()) == 3000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_routing_map(torch.zeros(4, 2), 2), "routing_map must be bool, but is Float"),
        (lambda: count_routing_map(torch.zeros(4).bool(), 2), r"routing_map must have 2 dimension\(s\)"),
        (lambda: count_routing_map(torch.zeros(4, 4).bool()[:, ::2], 2), "is not contiguous: pass routing_map.conti"),
        (lambda: count_routing_map(torch.zeros(4, 2).bool(), 3), r"shape \[4, 2\] cannot be cut into 3 samples"),
        (lambda: count_routing_map(torch.zeros(4, 2).bool(), 0), "cannot be cut into 0 samples"),
        (lambda: count_routing_map(torch.zeros(4, 2).bool(), -1), "num_samples is negative: -1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
