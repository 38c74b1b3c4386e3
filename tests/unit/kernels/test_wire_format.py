"""Rows in wire formats: every kernel of every instruction set against the plain-PyTorch reference, and the bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import LANE_BYTES, ChunkList, WireFormat, row_map_from_sources
from megatron_moe_opt.runtime.engine import steps
from tests import kernel_reference as reference
from tests.unit.permute_cases import DTYPES, equal_bits, random_map
from tests.unit.wire_cases import CODED, NARROW, assert_same_rows, each_cpu_kernel, filled, wire_rows

HIDDEN = [1, 3, 31, 32, 33, 64, 127, 128, 129, 160, 257, 400]


@st.composite
def matrices(draw, most_rows=6, dtypes=tuple(DTYPES)):
    """Rows of a dtype: any sizes, any values."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.integers(0, most_rows)), draw(st.sampled_from(HIDDEN))
    return filled(shape, draw(st.sampled_from(dtypes)), generator)


@settings(max_examples=150)
@given(matrices(), st.sampled_from(NARROW))
def test_rows_narrow_and_widen_as_the_reference_says(rows, wire):
    hidden = rows.size(1)
    expected = reference.narrow(rows, wire)
    back = reference.widen(reference.narrow(rows, wire), wire, hidden).to(rows.dtype)
    for _ in each_cpu_kernel():
        packed = wire_rows(rows, wire, fill=7)
        kernels.narrow_rows(rows, wire, packed)
        written = packed.view(torch.uint8)
        assert_same_rows(packed[:, : -LANE_BYTES // packed.element_size()], expected)
        assert (written[:, -LANE_BYTES:] == 7).all()  # the lane is left alone
        out = torch.empty_like(rows)
        kernels.widen_rows(packed, wire, out)
        assert_same_rows(out, back)


@settings(max_examples=150)
@given(matrices(), st.sampled_from(CODED))
def test_no_element_is_further_away_than_the_formats_bound(rows, wire):
    packed, out = wire_rows(rows, wire), torch.empty_like(rows)
    kernels.narrow_rows(rows, wire, packed)
    kernels.widen_rows(packed, wire, out)
    blocks = -(-rows.size(1) // wire.block)
    padded = torch.nn.functional.pad(rows.double(), (0, blocks * wire.block - rows.size(1)))
    finite = padded.isfinite()
    blocked = torch.where(finite, padded.abs(), 0).view(-1, blocks, wire.block)
    largest = blocked.amax(2).repeat_interleave(wire.block, 1)[:, : rows.size(1)]
    assert torch.equal(out.isnan(), ~rows.isfinite())
    error = (out.double() - rows.double()).abs()
    bound = torch.maximum(rows.double().abs() * 2.0**-4, largest * 2.0**-17)
    bound = torch.maximum(bound, torch.tensor(2.0**-136))  # half a step of the least scale
    bound += torch.finfo(rows.dtype).smallest_normal * torch.finfo(rows.dtype).eps / 2  # half a step of denormals
    in_range = rows.isfinite() & (largest <= (448 * 2.0**119 if wire is WireFormat.MXFP8 else torch.inf))
    in_range &= largest < 63_488 if rows.dtype == torch.float16 and wire is WireFormat.MXFP8 else in_range
    assert (error <= bound)[in_range].all()


def test_a_block_that_is_all_finite_arrives_finite():
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.full((1, 32), torch.finfo(dtype).max).to(dtype)
        for wire in CODED:
            packed, out = wire_rows(rows, wire), torch.empty_like(rows)
            kernels.narrow_rows(rows, wire, packed)
            kernels.widen_rows(packed, wire, out)
            assert out.isfinite().all()


def test_every_code_and_every_tie_is_rounded_to_nearest_even():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([ties.nextafter(torch.tensor(torch.inf)), ties, ties.nextafter(torch.tensor(0.0))])
    every_bfloat16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    values = torch.cat([codes, around, every_bfloat16[every_bfloat16.abs() <= 448]])
    values = torch.cat([values, -values])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    rows = torch.nn.functional.pad(values, (0, 1), value=448.0)  # so that every scale is 1
    expected = rows.to(torch.float8_e4m3fn).view(torch.uint8)
    for _ in each_cpu_kernel():
        for wire in CODED:
            packed = wire_rows(rows, wire)
            kernels.narrow_rows(rows, wire, packed)
            assert torch.equal(packed[:, :32], expected)


@pytest.mark.parametrize("wire", CODED)
def test_every_code_is_read_as_what_it_means(wire):
    payload = torch.zeros(1, wire.payload_bytes(256, torch.float32), dtype=torch.uint8)
    payload[0, :256] = torch.arange(256)
    one = torch.ones(2).view(torch.uint8) if wire is WireFormat.FP8 else torch.full((8,), 127, dtype=torch.uint8)
    payload[0, 256 : 256 + one.numel()] = one
    for _ in each_cpu_kernel():
        out = torch.empty(1, 256)
        kernels.widen_rows(payload, wire, out)
        assert_same_rows(out, payload[:, :256].view(torch.float8_e4m3fn).float())


@settings(max_examples=60)
@given(matrices(30), st.sampled_from(NARROW), st.integers(0, 2**31))
def test_permuted_rows_are_those_of_the_token(tokens, wire, seed):
    generator = torch.Generator().manual_seed(seed)
    routing_map = random_map(len(tokens), 5, 3, generator, 0.2)
    probs = torch.rand(routing_map.shape, generator=generator)
    row_map = kernels.build_row_map(routing_map)
    rows, row_probs, sources = reference.permute(tokens, routing_map, probs)
    expected = reference.pack(reference.narrow(tokens, wire)[sources], row_probs, LANE_BYTES)
    for _ in each_cpu_kernel():
        packed = kernels.permute_packed(tokens, probs, row_map, wire)
        if wire.dtype_of(tokens.dtype) == torch.bfloat16:
            hidden = tokens.size(1)
            assert_same_rows(packed[:, :hidden], expected[:, :hidden])
            assert equal_bits(packed[:, hidden:].contiguous(), expected[:, hidden:].contiguous())
        else:
            assert equal_bits(packed, expected)
        grads = kernels.unpermute_probs(packed, row_map, probs.dtype)
        assert torch.equal(grads, torch.where(routing_map, probs, 0))


def test_a_gradient_that_would_be_lost_is_refused():
    row_map = kernels.build_row_map(torch.ones(4, 2))
    tokens = torch.zeros(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="packed rows have no gradient of their own"):
        kernels.permute_packed(tokens, torch.ones(4, 2), row_map)


@settings(max_examples=60)
@given(matrices(9), st.sampled_from(NARROW), st.integers(0, 2**31))
def test_rows_are_gathered_and_reordered(rows, wire, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = rows.size(1)
    narrow = reference.narrow(rows, wire)
    wide = reference.widen(narrow, wire, hidden).to(rows.dtype)
    sources = torch.randint(0, max(len(rows), 1), (5 if len(rows) else 0,), generator=generator)
    first = int(torch.randint(0, len(rows) + 1, (), generator=generator))
    chunks = ChunkList.from_counts([first, 0, len(rows) - first], [2, 1, 0])
    packed = wire_rows(rows, wire)
    packed[:, : narrow.size(1)] = narrow
    for _ in each_cpu_kernel():
        out = torch.empty(len(sources), hidden, dtype=rows.dtype)
        kernels.gather_rows(packed, wire, row_map_from_sources(sources, len(rows)), out)
        assert_same_rows(out, wide[sources])
        out = torch.empty_like(rows)
        steps.run_now(steps.convert_rows(packed, wire, out, WireFormat.SAME, hidden, chunks))
        assert_same_rows(out, reference.copy_chunks(wide, chunks))
        there = wire_rows(rows, wire, fill=3)
        steps.run_now(steps.convert_rows(rows, WireFormat.SAME, there, wire, hidden, chunks))
        moved = reference.copy_chunks(narrow, chunks)
        assert_same_rows(there[:, : narrow.size(1)], moved)
        assert (there.view(torch.uint8)[:, -LANE_BYTES:] == 3).all()


@settings(max_examples=100)
@given(
    matrices(), st.sampled_from(list(WireFormat)), st.sampled_from(list(WireFormat)), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
def test_sums_are_taken_in_float32_and_rounded_once(rows, wire, out_wire, given_out, seed):
    assume(wire.block is None or out_wire.block is None or wire is out_wire)
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = rows.size(1), rows.dtype
    routing_map = random_map(7, 9, 3, generator, 0.3)
    row_map = kernels.build_row_map(routing_map)
    rows = filled((row_map.num_rows, hidden), dtype, generator)
    narrow = reference.narrow(rows, wire)
    packed = wire_rows(rows, wire)
    packed[:, : narrow.size(1)] = narrow
    total = reference.sum_rows(reference.widen(narrow, wire, hidden), row_map.sources, 7)
    expected = reference.narrow(total, out_wire) if out_wire.block else total.to(out_wire.dtype_of(dtype))
    for _ in each_cpu_kernel():
        out = wire_rows(torch.empty(7, hidden, dtype=dtype), out_wire, fill=5) if given_out else None
        got = kernels.sum_packed_rows(packed, hidden, row_map, wire, out, out_wire, dtype)
        assert got.dtype == out_wire.dtype_of(dtype) and (out is None or got is out)
        if out is not None:
            assert (got.view(torch.uint8)[:, -LANE_BYTES:] == 5).all()
        assert_same_rows(got[:, : expected.size(1)], expected)


@settings(max_examples=60)
@given(matrices(), st.sampled_from(CODED), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_parts_are_added_in_their_order(rows, wire, number, in_place, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = rows.size(1)
    parts = [wire_rows(rows, wire, fill=1) for _ in range(number)]
    for part in parts:
        narrow = reference.narrow(filled(rows.shape, rows.dtype, generator), wire)
        part[:, : narrow.size(1)] = narrow
    total = reference.widen(parts[0], wire, hidden)
    for part in parts[1:]:
        total = total + reference.widen(part, wire, hidden)
    expected = reference.narrow(total, wire)
    for _ in each_cpu_kernel():
        given_parts = [part.clone() for part in parts]
        out = given_parts[-1] if in_place else wire_rows(rows, wire, fill=1)
        steps.run_now(steps.sum_parts(given_parts, out, [(0, hidden, wire)]))
        assert torch.equal(out[:, : expected.size(1)], expected)
        assert (out[:, expected.size(1) :] == 1).all()


def test_payloads_of_formats():
    assert WireFormat.SAME.payload_bytes(7168, torch.float32) == 4 * 7168
    assert WireFormat.BF16.payload_bytes(7168, torch.float32) == 2 * 7168
    assert WireFormat.FP8.payload_bytes(7168, torch.bfloat16) == 7168 + 4 * 56  # DeepEP's bytes
    assert WireFormat.MXFP8.payload_bytes(7168, torch.bfloat16) == 7168 + 224
    assert WireFormat.FP8.payload_bytes(130, torch.bfloat16) == 144  # 130 + 2 + 2 * 4, up to 16
    assert WireFormat.MXFP8.payload_bytes(33, torch.bfloat16) == 48


def test_refusals():
    rows, uint8 = torch.zeros(4, 64), torch.zeros(4, 80, dtype=torch.uint8)
    with pytest.raises(ValueError, match="64 elements in fp8 do not fit target of shape"):
        kernels.narrow_rows(rows, WireFormat.FP8, uint8[:, :70].contiguous())
    with pytest.raises(ValueError, match="target is Float, but rows in fp8 are Byte"):
        kernels.narrow_rows(rows, WireFormat.FP8, torch.zeros(4, 80))
    with pytest.raises(ValueError, match="target has 3 rows, not 4"):
        kernels.narrow_rows(rows, WireFormat.FP8, uint8[:3])
    with pytest.raises(ValueError, match="target of shape .* is not contiguous"):
        kernels.narrow_rows(rows, WireFormat.FP8, torch.zeros(80, 4, dtype=torch.uint8).T)
    with pytest.raises(ValueError, match=r"a source is outside \[0, 4\)"):
        kernels.gather_rows(uint8, WireFormat.FP8, row_map_from_sources(torch.tensor([4]), 5), torch.zeros(1, 64))
    two = kernels.build_row_map(torch.ones(4, 2).bool())
    with pytest.raises(ValueError, match="a row map that is cut does not say which row is whose"):
        kernels.gather_rows(uint8, WireFormat.FP8, two.cut(2), torch.zeros(8, 64))
    with pytest.raises(ValueError, match="source is Double"):
        kernels.narrow_rows(rows.double(), WireFormat.FP8, uint8)
