"""The steps of ops: copies of columns, sums of parts, and when an exchange makes what it sends."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels import LANE_BYTES, ChunkList
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.collectives import sum_in_rank_order
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tests import kernel_reference as reference
from tests.unit.permute_cases import CPU_KERNELS, DTYPES, PROB_DTYPES


def run(*ops: steps.Steps) -> None:
    schedule = Schedule("steps", tuple(Op(Kind.COPY, Lane.COPY, chunk) for chunk in range(len(ops))))
    executor().run(schedule, ops)


@pytest.mark.parametrize("hidden", [1, 8, 65])
@pytest.mark.parametrize("prob_dtype", PROB_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_come_apart_and_together_chunk_by_chunk(dtype, prob_dtype, hidden):
    parts = ChunkList.from_counts([3, 0, 2, 4], [2, 0, 3, 1]).split([3, 6])
    tokens, probs = torch.randn(9, hidden).to(dtype), torch.rand(9).to(prob_dtype)
    packed = reference.pack(tokens, probs, LANE_BYTES)
    hidden_bytes, prob_bytes = hidden * dtype.itemsize, prob_dtype.itemsize
    got_tokens, got_probs = torch.empty_like(tokens), torch.empty_like(probs)
    run(*(
        steps.copy_columns(packed, 0, got_tokens, 0, hidden_bytes, part)
        + steps.copy_columns(packed, hidden_bytes, got_probs, 0, prob_bytes, part)
        for part in parts
    ))  # fmt: skip
    order = [3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert torch.equal(got_tokens, tokens[order])
    assert torch.equal(got_probs, probs[order])
    again = torch.zeros_like(packed)
    run(*(
        steps.copy_columns(got_tokens, 0, again, 0, hidden_bytes, part.inverse())
        + steps.copy_columns(got_probs, 0, again, hidden_bytes, prob_bytes, part.inverse())
        for part in parts
    ))  # fmt: skip
    assert torch.equal(again.view(torch.uint8), packed.view(torch.uint8))


@pytest.mark.parametrize("isa", CPU_KERNELS)
@given(data=st.data())
def test_sums_are_taken_in_rank_order_and_rounded_once(isa, data):
    dtype = data.draw(st.sampled_from(PROB_DTYPES))
    ranks, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    width, first, after = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 7, 64, 131], [0, 3], [0, 2]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    parts = torch.randn(ranks, rows, first + width + after, generator=generator, dtype=torch.float64).to(dtype)
    summed = torch.full_like(parts[0], 7.0)
    load_extension().select_cpu_kernels(isa)
    try:
        run(steps.sum_parts(list(parts), summed, [(first * dtype.itemsize, width, dtype)]))
    finally:
        load_extension().select_cpu_kernels("best")
    assert torch.equal(summed[:, first : first + width], sum_in_rank_order(parts.clone())[:, first : first + width])
    assert (summed[:, :first] == 7).all() and (summed[:, first + width :] == 7).all()


ROWS = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: steps.copy_columns(ROWS, 4, ROWS + 1, 0, 24, ChunkList.from_counts([4], [0])), "24 bytes at 4 and 0"),
        (lambda: steps.copy_rows(ROWS, torch.zeros(3, 6), ChunkList.from_counts([4], [0])), r"outside \[0, 4\) or"),
        (lambda: steps.copy_rows(ROWS.T, ROWS.T, ChunkList.from_counts([6], [0])), "is not contiguous"),
        (lambda: steps.sum_parts([ROWS], ROWS, [(8, 5, torch.float32)]), "5 elements at byte 8 do not fit rows of 24"),
        (lambda: steps.sum_parts([ROWS, ROWS[:2]], ROWS, [(0, 6, torch.float32)]), "does not fit the sum's"),
        (lambda: steps.sum_parts([ROWS], ROWS, [(0, 6, torch.int64)]), "only float32, bfloat16 and float16"),
        (lambda: steps.sum_parts([], ROWS, [(0, 6, torch.float32)]), "at least one part"),
    ],
)  # fmt: skip
def test_wrong_steps_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_an_exchange_makes_tensors_of_its_blocks_when_it_begins():
    """Of those that are not empty: all exchanges of a schedule are made before the first message leaves."""
    ranks, made = 16, []

    @contextmanager
    def narrows():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield
        made.append(sum(event.name == "aten::narrow" for event in profile.events()))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        rows, counts = torch.zeros(4, 4), [1] * 4 + [0] * (ranks - 4)
        with narrows():
            (exchange,) = steps.all_to_all(rows, counts, torch.empty_like(rows), counts, dist.group.WORLD).actions
        with narrows():
            exchange.begin()
    finally:
        dist.destroy_process_group()
    of_a_side = 3 + 1 + 1  # peers, the own block, and what stands for all that are empty
    assert made == [0, 2 * of_a_side]
