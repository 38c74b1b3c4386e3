"""Rows that lie past 2^31 elements. Few of them are touched, so that the emulator's memory, whose pages exist once they
are written, holds them too.
"""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.kernels import ChunkList, row_map_from_sources
from megatron_moe_opt.kernels.packed_rows import spread_rows, sum_packed_rows
from megatron_moe_opt.kernels.row_map import RowMap
from megatron_moe_opt.runtime.engine import steps
from tests.gpu import EMULATED

PAST, WIDTH = 2**31, 64
PITCH = PAST // 2 + WIDTH
"""Elements of a row, of which the third begins past 2^31."""


@pytest.fixture(autouse=True)
def memory(device):
    if not EMULATED and torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free device memory")


def far_rows(device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows, bf16 [3, PITCH], of which the first WIDTH columns are written, and these columns."""
    rows = torch.empty(3, PITCH, dtype=torch.bfloat16, device=device)
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    rows[:, :WIDTH] = values.to(device)
    return rows, values


def test_rows_that_are_added(device):
    rows, values = far_rows(device, 1)
    total = sum_packed_rows(rows, WIDTH, row_map_from_sources(torch.tensor([0, 1, 0], device=device), 2))
    assert torch.equal(total.cpu(), torch.stack(((values[0].float() + values[2].float()).bfloat16(), values[1])))


def test_parts_that_are_added(device):
    (first, values), (second, others) = far_rows(device, 2), far_rows(device, 3)
    steps.run_now(steps.sum_parts([first, second], first, [(0, WIDTH, torch.bfloat16)]))
    assert torch.equal(first[:, :WIDTH].cpu(), (values.float() + others.float()).bfloat16())


def test_rows_that_tokens_go_to(device):
    hidden = 4096
    num_rows = PAST // hidden + 3
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
    rows[:2] = torch.tensor([num_rows - 1, num_rows - 2], device=device)  # of all the rows, those of the two tokens
    offsets = torch.arange(3, device=device)
    tokens = torch.randn(2, hidden, generator=torch.Generator().manual_seed(4)).bfloat16()
    spread = spread_rows(tokens.to(device), RowMap(2, 0, num_rows, offsets, rows, None, None, None))
    assert torch.equal(spread[-2:].flip(0).cpu(), tokens)


def test_chunks(device):
    rows, width = 2**21 + 8, 1024
    source = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(5)).bfloat16()
    source[-5:] = values.to(device)
    places = torch.tensor([[rows - 5, rows - 2], [rows - 3, rows - 7], [3, 2]], device=device)
    steps.run_now(steps.copy_rows(source, target, ChunkList(*places, num_rows=5)))
    assert torch.equal(target[-3:].cpu(), values[:3]) and torch.equal(target[-7:-5].cpu(), values[3:])
