"""Packed rows: tokens and probabilities in one row, through chunks and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import LANE_BYTES, ChunkList, reference
from tests.unit.permute_cases import DTYPES, PROB_DTYPES, equal_bits, leaves, random_map, workloads


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize("hidden", [1, 8, 65])
@pytest.mark.parametrize("prob_dtype", PROB_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_and_join(dtype, prob_dtype, hidden):
    chunks = ChunkList.from_counts([3, 0, 2, 4], [2, 0, 3, 1])
    tokens, probs = torch.randn(9, hidden).to(dtype), torch.rand(9).to(prob_dtype)
    packed = reference.pack(tokens, probs, LANE_BYTES)
    got_tokens, got_probs = kernels.split_chunks(packed, chunks, prob_dtype)
    order = [3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert torch.equal(got_tokens, tokens[order])
    assert torch.equal(got_probs, probs[order])
    assert equal_bits(kernels.join_chunks(got_tokens, got_probs, chunks), packed)


def test_a_whole_exchange_on_one_rank():
    """permute_packed, split, experts, join, unpermute: the gradient of every step is in the next one's layout."""
    generator = torch.Generator().manual_seed(2)
    routing_map = random_map(50, 6, 2, generator)
    row_map = kernels.build_row_map(routing_map)
    tokens, probs = leaves(torch.randn(50, 16, generator=generator), torch.rand(50, 6, generator=generator))
    packed = kernels.permute_packed(tokens, probs, row_map)
    chunks = ChunkList.from_counts(row_map.expert_counts, [3, 1, 5, 0, 2, 4])
    rows, row_probs = kernels.split_chunks(packed.detach(), chunks, torch.float32)
    rows, row_probs = leaves(rows, row_probs)
    out_rows = kernels.copy_chunks((rows * row_probs[:, None]).detach(), chunks.inverse()).requires_grad_()
    out = kernels.unpermute_rows(out_rows, row_map)
    grad = torch.randn(out.shape, generator=generator)
    grad_out_rows = kernels.copy_chunks(torch.autograd.grad(out, out_rows, grad)[0], chunks)
    grads = torch.autograd.grad(rows * row_probs[:, None], [rows, row_probs], grad_out_rows)
    got = torch.autograd.grad(packed, [tokens, probs], kernels.join_chunks(*grads, chunks))
    x, p = leaves(tokens, probs)
    permuted, permuted_probs, _ = reference.permute(x, routing_map, p)
    expected_out = reference.unpermute(permuted * permuted_probs[:, None], routing_map)
    expected = torch.autograd.grad(expected_out, [x, p], grad)
    assert torch.equal(out, expected_out)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, c: kernels.permute_packed(torch.randn(3, 4).T, torch.ones(4, 2), m),
            "tokens .* is not contiguous",
        ),
        (
            lambda m, c: kernels.permute_packed(torch.randn(5, 3), torch.ones(5, 2), m),
            "tokens has 5 rows, but the row map has 4",
        ),
        (lambda m, c: kernels.unpermute_rows(torch.randn(3, 8).T, m), "permuted_tokens .* is not contiguous"),
        (lambda m, c: kernels.split_chunks(torch.randn(8, 3), c, torch.float32), "no room for their 16-byte lane"),
        (lambda m, c: kernels.split_chunks(torch.randn(7, 9), c, torch.float32), "do not fit chunks of 8 rows"),
        (lambda m, c: kernels.split_chunks(torch.randn(8, 9), c, torch.int32), "probs are Int: only"),
        (lambda m, c: kernels.join_chunks(torch.randn(8, 9), torch.rand(7), c), "probs have 7 rows, but tokens have 8"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(kernels.build_row_map(torch.ones(4, 2)), ChunkList.from_counts([4, 4], [1, 0]))
