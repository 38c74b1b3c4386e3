"""Row maps cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels.row_map import cut_counts, row_map_from_sources
from tests.unit.permute_cases import workloads


@settings(max_examples=60)
@given(workloads(dtypes=(torch.float32,)), st.sampled_from([1, 2, 3, 8, 50]))
def test_a_cut_map_moves_the_same_rows_in_chunk_order(case, num_chunks):
    tokens, probs, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    cut = row_map.cut(num_chunks)
    assert cut.num_chunks == num_chunks and cut.offsets is row_map.offsets and cut.experts is row_map.experts
    # Row by row: the experts' rows are cut into parts, and the parts of a chunk come together.
    parts = cut_counts(row_map.expert_counts, num_chunks)
    by_expert = row_map.sources.split(row_map.expert_counts.tolist())
    pieces = [rows.split(sizes) for rows, sizes in zip(by_expert, parts.T.tolist(), strict=True)]
    expected = [pieces[e][c] for c in range(num_chunks) for e in range(routing_map.size(1))]
    sources = torch.empty_like(row_map.sources)
    sources[cut.rows] = row_map.sources[row_map.rows]
    assert torch.equal(sources, torch.cat(expected))
    # What permute writes, and what unpermute sums, in the same order of experts.
    plain, moved = kernels.permute_packed(tokens, probs, row_map), kernels.permute_packed(tokens, probs, cut)
    assert torch.equal(moved[cut.rows].view(torch.uint8), plain[row_map.rows].view(torch.uint8))
    rows = torch.randn(row_map.num_rows, tokens.size(1))
    cut_rows = torch.empty_like(rows)
    cut_rows[cut.rows] = rows[row_map.rows]
    sums = kernels.sum_packed_rows(rows, tokens.size(1), row_map)
    assert torch.equal(kernels.sum_packed_rows(cut_rows, tokens.size(1), cut), sums)


def rows_in_chunk_order(row_map, num_chunks):
    """What `cut` makes of a map's rows, in PyTorch's operations; those left over stay."""
    counts, experts = row_map.expert_counts, row_map.experts.long()
    parts = cut_counts(counts, num_chunks)
    first_row = (parts.view(-1).cumsum(0) - parts.view(-1)).view_as(parts)
    first_in_expert = parts.cumsum(0) - parts
    index = row_map.rows - (counts.cumsum(0) - counts)[experts]
    of_expert = counts.clamp(min=1)[experts]
    inside = index.clamp(max=of_expert - 1)
    chunk = ((inside + 1) * num_chunks - 1) // of_expert
    cut = inside + (first_row - first_in_expert)[chunk, experts]
    return torch.where(index < counts[experts], cut, row_map.rows)


@given(
    st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=12),
    st.sampled_from([2, 3, 7, 16, 100]),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_rows_are_cut_as_by_pytorchs_operations(counts, num_chunks, left_over, random):
    """One expert, experts without rows, more chunks than rows, and rows left over, whatever the entries' order."""
    entries = list(enumerate(expert for expert, count in enumerate(counts) for _ in range(count)))
    random.shuffle(entries)
    entries += [(row, 0) for row in range(len(entries), len(entries) + left_over)]
    rows, experts = torch.tensor(entries, dtype=torch.int64).view(-1, 2).T.contiguous()
    offsets = torch.tensor([0, len(entries)])
    row_map = kernels.RowMap(
        1, len(counts), len(entries), offsets, rows, experts.int(), torch.zeros_like(rows), torch.tensor(counts)
    )
    cut = row_map.cut(num_chunks)
    assert torch.equal(cut.rows, rows_in_chunk_order(row_map, num_chunks))
    assert cut.rows.sort().values.tolist() == list(range(len(entries)))
    assert cut.rows.tolist()[sum(counts) :] == list(range(sum(counts), len(entries)))


@settings(max_examples=30)
@given(workloads(dtypes=(torch.float32,)), st.sampled_from([2, 5, 50]))
def test_maps_of_routing_are_cut_as_by_pytorchs_operations(case, num_chunks):
    _, _, routing_map, capacity = case
    row_map = kernels.build_row_map(routing_map, capacity)
    assert torch.equal(row_map.cut(num_chunks).rows, rows_in_chunk_order(row_map, num_chunks))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(1, 12))
def test_parts_are_equal_to_a_row_and_complete(counts, num_chunks):
    parts = cut_counts(torch.tensor(counts), num_chunks)
    assert parts.shape == (num_chunks, len(counts)) and parts.sum(0).tolist() == counts
    assert int((parts.max(0).values - parts.min(0).values).max()) <= 1


def test_maps_that_cannot_be_cut():
    cut = kernels.build_row_map(torch.ones(4, 2)).cut(2)
    for row_map in (cut, row_map_from_sources(torch.tensor([0, 1]), 2)):
        with pytest.raises(ValueError, match="only a row map that knows its experts and is not cut yet"):
            row_map.cut(2)
