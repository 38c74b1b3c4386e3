"""Chunk copies on CUDA: equal to the CPU's, whatever the sizes of the chunks and rows."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import ChunkList
from tests.gpu import sized

# Rows of each chunk.
COUNTS = {
    "nothing": [0, 0, 0],
    "one-row": [1],
    "one-hot": [0, sized(50_000, 600), 0, 1],
    "uneven": [3, 0, 700, 2, 41, 0, 1],
    "many-chunks": [(7 * c) % 13 for c in range(sized(3000, 300))],
}


def chunk_list(name, device):
    counts = COUNTS[name]
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(9))
    return ChunkList.from_counts(counts, order, device)


@pytest.mark.parametrize("width", [1, 3, 8, 64, 1001, 1024])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS)
def test_equals_the_cpu(device, counts, dtype, width):
    here, there = chunk_list(counts, "cpu"), chunk_list(counts, device)
    rows = torch.randint(0, 256, (here.num_rows, width), generator=torch.Generator().manual_seed(1)).to(dtype)
    moved = kernels.copy_chunks(rows.to(device), there)
    assert torch.equal(moved.cpu(), kernels.copy_chunks(rows, here))
    assert torch.equal(kernels.copy_chunks(moved, there.inverse()).cpu(), rows)
