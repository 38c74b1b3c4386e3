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
    x, p = leaves(tokens, probs)
    packed = kernels.permute_packed(x, p, row_map)
    permuted, permuted_probs, _ = reference.permute(tokens, routing_map, probs, capacity)
    assert equal_bits(packed, reference.pack(permuted, permuted_probs, LANE_BYTES))
    # The gradient travels in the same layout.
    grad_rows = torch.randn(permuted.shape).to(tokens.dtype)
    grad_probs = torch.randn(permuted_probs.shape).to(probs.dtype)
    got = torch.autograd.grad(packed, [x, p], reference.pack(grad_rows, grad_probs, LANE_BYTES))
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
def test_unpermute_rows_matches_the_reference(case):
    tokens, _, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    rows = torch.randn(row_map.num_rows, tokens.size(1))
    mine, theirs = leaves(rows)[0], leaves(rows)[0]
    got = kernels.unpermute_rows(mine, row_map)
    expected = reference.unpermute(theirs, routing_map, capacity=capacity)
    assert torch.equal(got, expected)
    grad = torch.randn(tokens.shape)
    assert torch.equal(torch.autograd.grad(got, mine, grad)[0], torch.autograd.grad(expected, theirs, grad)[0])


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
        (lambda m: kernels.unpermute_rows(torch.randn(3, 8).T, m), "permuted_tokens .* is not contiguous"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(kernels.build_row_map(torch.ones(4, 2)))
