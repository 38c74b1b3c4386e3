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


@settings(max_examples=40)
@given(workloads(dtypes=(torch.float32,)))
def test_rows_among_others_are_copied_and_summed_as_alone(case):
    tokens, _, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    places = torch.arange(row_map.num_rows) * 2 + 1
    spread = kernels.spread_rows(tokens, row_map)
    among = torch.full((2 * row_map.num_rows + 1, tokens.size(1)), torch.nan)
    kernels.spread_rows(tokens, row_map.among(places), among)
    assert torch.equal(among[places], spread) and among[::2].isnan().all()
    alone = kernels.sum_packed_rows(spread, tokens.size(1), row_map)
    assert torch.equal(kernels.sum_packed_rows(among, tokens.size(1), row_map.among(places)), alone)
    if row_map.num_rows:
        with pytest.raises(ValueError, match="row map: a row is outside"):
            kernels.spread_rows(tokens, row_map.among(places), among[:-2])


def test_rows_are_spread_to_where_they_are_asked_to_or_refused():
    row_map = kernels.build_row_map(torch.tensor([[1, 1], [0, 1], [0, 0]]))
    rows, out = torch.arange(12).view(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    assert kernels.spread_rows(rows, row_map, out) is out
    assert torch.equal(out, rows[row_map.sources, :2])
    for rows_of, target, said in (
        (rows[:2], out, "2 rows, but the row map has 3 tokens"),
        (rows, out[:2], "row map: 3 rows, but there are 2"),
        (rows, out.int(), "and dtype Int cannot hold the beginnings of rows"),
        (rows, torch.zeros(3, 5, dtype=torch.int64), "cannot hold the beginnings of rows"),
        (rows.byte()[:, :3].contiguous(), torch.zeros(3, 2).byte(), "must begin at even addresses"),
        (rows, rows, "rows and out share memory"),
        (rows.T, out, "not contiguous|4 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            kernels.spread_rows(rows_of, row_map, target)
