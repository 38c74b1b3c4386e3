"""Counts of a sample's tokens for each expert, against the plain-PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import count_routing_map, count_topk
from tests import kernel_reference as reference


@st.composite
def layouts(draw):
    """Samples, tokens of each, experts, experts of a token, batch_first, and a generator."""
    sizes = draw(st.integers(1, 9)), draw(st.sampled_from([0, 1, 3, 7, 100, 255, 256, 700])), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return *sizes, draw(st.integers(0, 9)), draw(st.booleans()), generator


@settings(max_examples=150)
@given(layouts())
def test_counts(case):
    samples, length, experts, topk, batch_first, generator = case
    chosen = torch.randint(experts, (samples * length, topk), generator=generator)
    expected = reference.count_topk(chosen, experts, samples, batch_first=batch_first)
    assert torch.equal(count_topk(chosen, experts, samples, batch_first=batch_first), expected)
    routing_map = torch.rand(samples * length, experts, generator=generator) < 0.3
    expected = reference.count_routing_map(routing_map, samples, batch_first=batch_first)
    assert torch.equal(count_routing_map(routing_map, samples, batch_first=batch_first), expected)


def test_which_rows_are_a_sample_s():
    # Two samples of two tokens; expert = row.
    experts = torch.arange(4).view(4, 1)
    assert count_topk(experts, 4, 2).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert count_topk(experts, 4, 2, batch_first=True).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    routing_map = torch.eye(4, dtype=torch.bool)
    assert count_routing_map(routing_map, 2).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert count_routing_map(routing_map, 2, batch_first=True).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("byte", [1, 2, 128, 255])
@pytest.mark.parametrize("batch_first", [False, True])
def test_any_byte_but_zero_is_routed_once(byte, batch_first):
    """Bytes count as in build_row_map, which the same map is permuted by."""
    routing_map = torch.full((300, 3), byte, dtype=torch.uint8).view(torch.bool)
    assert count_routing_map(routing_map, 1, batch_first=batch_first).tolist() == [[300] * 3]
    assert count_routing_map(routing_map, 1).tolist() == [kernels.build_row_map(routing_map).expert_counts.tolist()]


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_hot_expert_wide_maps_and_many_tokens(batch_first):
    """Counts above a byte, columns above a tile of the byte sums, and one counter for everything."""
    routing_map = torch.zeros(3 * 1000, 1500, dtype=torch.bool)
    routing_map[:, 1499] = True
    counts = count_routing_map(routing_map, 3, batch_first=batch_first)
    assert counts[:, 1499].tolist() == [1000] * 3 and int(counts.sum()) == 3000
    counts = count_topk(torch.full((3 * 1000, 2), 1499), 1500, 3, batch_first=batch_first)
    assert counts[:, 1499].tolist() == [2000] * 3 and int(counts.sum()) == 6000


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bad", [-1, 5, 7, 8, 2**40, -(2**63)])
def test_experts_out_of_range(bad, batch_first):
    """Indices lie inside and outside the power of two into which they are masked, in every position of a token."""
    for position in range(12):
        experts = torch.zeros(4, 3, dtype=torch.int64)
        experts.view(-1)[position] = bad
        with pytest.raises(ValueError, match=r"experts holds an index outside \[0, 5\), the number of experts"):
            count_topk(experts, 5, 2, batch_first=batch_first)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_topk(torch.zeros(4, 2), 5, 2), "experts must be int64, but are Float"),
        (lambda: count_topk(torch.zeros(4).long(), 5, 2), r"experts must have 2 dimension\(s\)"),
        (lambda: count_topk(torch.zeros(4, 4).long()[:, ::2], 5, 2), "is not contiguous: pass experts.contiguous"),
        (lambda: count_topk(torch.zeros(4, 2).long(), 5, 3), r"shape \[4, 2\] cannot be cut into 3 samples"),
        (lambda: count_topk(torch.zeros(4, 2).long(), 5, 0), "cannot be cut into 0 samples"),
        (lambda: count_topk(torch.zeros(4, 2).long(), -1, 2), "num_experts is negative: -1"),
        (lambda: count_routing_map(torch.zeros(4, 2), 2), "routing_map must be bool, but is Float"),
        (lambda: count_routing_map(torch.zeros(4, 2).bool(), 3), r"shape \[4, 2\] cannot be cut into 3 samples"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
