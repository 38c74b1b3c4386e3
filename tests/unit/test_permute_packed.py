"""Packed rows: tokens and probabilities in one row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import LANE_BYTES
from tests import kernel_reference as reference
from tests.unit.permute_cases import equal_bits, leaves, workloads


@settings(max_examples=60)
@given(workloads())
def test_forward_and_backward_match_the_reference(case):
    tokens, probs, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    packed = kernels.permute_packed(tokens, probs, row_map)
    permuted, permuted_probs, _ = reference.permute(tokens, routing_map, probs, capacity)
    assert equal_bits(packed, reference.pack(permuted, permuted_probs, LANE_BYTES))
    # The gradient travels in the same layout.
    grad_rows = torch.randn(permuted.shape).to(tokens.dtype)
    grad_probs = torch.randn(permuted_probs.shape).to(probs.dtype)
    returned = reference.pack(grad_rows, grad_probs, LANE_BYTES)
    got = (
        kernels.sum_packed_rows(returned, tokens.size(1), row_map),
        kernels.unpermute_probs(returned, row_map, probs.dtype),
    )
    y, q = leaves(tokens, probs)
    outputs = kernels.permute(
        y,
        routing_map,
        q,
        None if capacity is None else capacity * routing_map.size(1),
        drop_and_pad=capacity is not None,
    )
    expected = torch.autograd.grad(outputs[:2], [y, q], [grad_rows, grad_probs])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@settings(max_examples=40)
@given(workloads(dtypes=(torch.float32,)))
def test_sums_and_copies_of_rows_match_the_reference(case):
    tokens, _, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    rows = torch.randn(row_map.num_rows, tokens.size(1)).requires_grad_()
    expected = reference.unpermute(rows, routing_map, capacity=capacity)
    assert torch.equal(kernels.sum_packed_rows(rows.detach(), tokens.size(1), row_map), expected)
    grad = torch.randn(tokens.shape)
    assert torch.equal(kernels.spread_rows(grad, row_map), torch.autograd.grad(expected, rows, grad)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: kernels.permute_packed(torch.randn(3, 4).T, torch.ones(4, 2), m),
            "tokens .* is not contiguous",
        ),
        (
            lambda m: kernels.permute_packed(torch.randn(5, 3), torch.ones(5, 2), m),
            "tokens has 5 rows, but the row map has 4",
        ),
        (lambda m: kernels.sum_packed_rows(torch.randn(3, 8).T, 3, m), "rows .* is not contiguous"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(kernels.build_row_map(torch.ones(4, 2)))
