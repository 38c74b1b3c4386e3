"""What is counted on the emulator: launches of every bound function (csrc/kernels/launches.txt), blocks, accesses."""

from __future__ import annotations

import re

from tests.emulator import counts  # before torch
from tests.emulator.build import KERNELS

import torch  # isort: skip

from megatron_moe_opt import kernels  # isort: skip
from megatron_moe_opt.extension import load_extension  # isort: skip
from megatron_moe_opt.kernels.row_map import row_map_from_sources  # isort: skip
from tools.bench.kernels import CodecWorkload  # isort: skip


def test_no_function_launches_more_than_the_table_says():
    made = counts.launch_table()
    assert made == counts.TABLE.read_text(), "if it is meant: python -m tests.emulator.counts --write"


def test_every_kernel_is_launched_by_a_function_of_the_table():
    table = counts.TABLE.read_text().split()
    declared = {name for source in KERNELS for name in re.findall(r"(\w+)_kernel\(", source.read_text())}
    assert declared and declared <= set(table)


def test_a_row_maps_launches_fill_the_device():
    routed = counts.routing(4096, 8, 2)
    launches, _ = counts.counted(lambda: kernels.build_row_map(routed, num_out_tokens=8192))
    blocks = {launch.kernel: launch.blocks for launch in launches}
    assert blocks == {"pack_masks_kernel": 128, "scan_tiles_kernel": 64, "fill_rows_kernel": 256}  # of 132 wanted


def test_ordering_the_rows_of_a_token_is_no_square_of_their_number():
    def asked(num_rows: int) -> int:
        sources = (torch.arange(num_rows) % 2).to(counts.DEVICE)
        launches, _ = counts.counted(lambda: row_map_from_sources(sources, 2))
        return next(launch.asked_read for launch in launches if launch.kernel == "order_rows_kernel")

    assert asked(4800) < 6 * asked(1200)


def test_many_rows_of_few_tokens_are_ordered_as_on_the_cpu():
    sources = torch.randint(0, 3, (30_000,), generator=torch.Generator().manual_seed(0))
    here, there = row_map_from_sources(sources, 3, 10), row_map_from_sources(sources.to(counts.DEVICE), 3, 10)
    for name in ("offsets", "rows", "experts"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))


def test_one_long_row_is_summed_by_as_many_blocks_as_many_short_ones():
    """As gradients of a rank's experts are, which return in one row."""

    def blocks(rows: int) -> int:
        ones = [torch.ones(rows, 2**17 // rows, dtype=torch.bfloat16).to(counts.DEVICE) for _ in range(3)]
        summed = torch.empty_like(ones[0])
        sums = load_extension().sum_parts(ones, summed, 0, summed.size(1), torch.bfloat16)
        (launch,), _ = counts.counted(sums.run)
        assert (summed.cpu() == 3).all()
        return launch.blocks

    assert blocks(1) == blocks(64)


def test_encode_reads_weights_that_tie_after_a_step_once():
    work = CodecWorkload(counts.DEVICE, 2**17, 2**17 // 100, "bf16", 1, learning_rate=1e-4)
    launches, _ = counts.counted(lambda: kernels.sr_encode(work.expert, work.shared, work.kept))
    collected, *later = (launch.read for launch in launches if launch.kernel != "guess_kernel")
    assert sum(later) < collected  # where lists overflow, each of these reads the weights as the first has


def test_permute_in_8_bits_moves_little_more_than_half_of_what_it_does_in_bfloat16():
    extension, row_map = load_extension(), kernels.build_row_map(counts.routing(8, 16, 8))
    tokens = torch.zeros(8, 1024, dtype=torch.bfloat16).to(counts.DEVICE)
    probs = torch.zeros(8, 16).to(counts.DEVICE)

    def sectors(wire: str) -> int:
        (launch,), _ = counts.counted(lambda: extension.permute_packed(row_map.tensors, tokens, probs, wire))
        return launch.read + launch.written

    assert max(sectors(wire) for wire in ("fp8", "mxfp8")) < 0.58 * sectors("same")
