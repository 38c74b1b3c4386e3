"""Chunks of rows: order, inverse, any dtype, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import ChunkList
from tests import kernel_reference as reference


def test_places_of_a_small_list_by_hand():
    # source: [a a | b | c c c]  ->  target order c, a, b: [c c c | a a | b]
    chunks = ChunkList.from_counts([2, 1, 3], [2, 0, 1])
    assert chunks.source_rows.tolist() == [0, 2, 3]
    assert chunks.target_rows.tolist() == [3, 5, 0]
    assert chunks.num_rows == 6
    rows = torch.tensor([[1], [2], [3], [4], [5], [6]])
    assert kernels.copy_chunks(rows, chunks).flatten().tolist() == [4, 5, 6, 1, 2, 3]


@settings(max_examples=80)
@given(st.data())
def test_matches_the_reference_and_megatron_core_and_inverts(data):
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    counts = data.draw(st.lists(st.integers(0, 9), max_size=12))
    order = data.draw(st.permutations(range(len(counts))))
    width = data.draw(st.sampled_from([1, 2, 17, 64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]))
    rows = torch.randint(-100, 100, (sum(counts), width)).to(dtype)
    chunks = ChunkList.from_counts(counts, order)
    moved = kernels.copy_chunks(rows, chunks)
    assert torch.equal(moved, reference.copy_chunks(rows, chunks))
    assert torch.equal(kernels.copy_chunks(moved, chunks.inverse()), rows)
    if counts:
        expected, _ = sort_chunks_by_idxs(rows, torch.tensor(counts), torch.tensor(order))
        assert torch.equal(moved, expected)


def test_large_rows_that_bypass_the_caches():
    rows = torch.arange(3000 * 4097, dtype=torch.int32).view(3000, 4097)
    chunks = ChunkList.from_counts([1000, 1, 1999], [1, 2, 0])
    assert torch.equal(kernels.copy_chunks(rows, chunks), torch.cat([rows[1000:1001], rows[1001:], rows[:1000]]))


def chunks_of(source, target, count, num_rows):
    return ChunkList(torch.tensor(source), torch.tensor(target), torch.tensor(count), num_rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ChunkList.from_counts([1, 2], [0, 0]), "is not a permutation of 2 chunks"),
        (lambda: ChunkList.from_counts([1, -2], [1, 0]), "has a negative count"),
        (lambda: kernels.copy_chunks(torch.ones(3, 2).T, ChunkList.from_counts([2], [0])), "is not contiguous"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), ChunkList.from_counts([3], [0])), "do not fit chunks of 3 rows"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), chunks_of([1], [0], [4], 4)), r"chunk 0 .* is outside \[0, 4\)"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), chunks_of([0], [-1], [4], 4)), "chunk 0 .* is outside"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), chunks_of([0], [0], [-1], 4)), "chunk 0 .* is outside"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), chunks_of([0], [0], [3], 4)), "have 3 rows together"),
        (lambda: kernels.copy_chunks(torch.ones(4, 2), chunks_of([0, 0], [0], [4], 4)), "differ in length"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
