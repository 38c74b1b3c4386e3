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
