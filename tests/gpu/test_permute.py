"""permute and unpermute on CUDA against the CPU kernels (bit for bit) and against the plain-PyTorch reference.

The CUDA kernels promise the CPU's order of rows and of sums: everything but the dot products of grad_probs, whose
additions are spread over threads, must have the same bits.
"""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels
from megatron_moe_opt.extension import load_extension
from tests import kernel_reference as reference
from tests.gpu import sized
from tests.unit.permute_cases import DTYPES, PROB_DTYPES, ROUNDING, leaves, random_map, relative_error

# tokens, hidden, experts, top-k, dropped
SHAPES = {
    "no-tokens": (0, 64, 4, 2, 0.0),
    "one-token": (1, 8, 1, 1, 0.0),
    "all-dropped": (130, 16, 7, 2, 1.0),
    "odd-hidden": (sized(300, 70), 67, 12, 3, 0.1),
    "four-byte-rows": (sized(300, 70), 130, 12, 3, 0.1),
    "one-vector": (sized(1000, 200), 8, 16, 2, 0.0),
    "no-hidden": (50, 0, 4, 2, 0.0),
    "common": (sized(4096, 130), 1024, 64, 8, 0.0),
    "wide-rows": (sized(512, 6), 7168, 128, 8, 0.0),
    "very-wide-rows": (sized(40, 3), 20000, 8, 2, 0.0),
    "many-experts": (sized(257, 70), 512, 1024, 8, 0.5),
    "most-experts": (33, 64, sized(6000, 3100), 8, 0.0),  # more than 48 KB of shared memory
    "every-expert": (70, 96, 300, 300, 0.0),  # more rows of a token than one stage holds
}
CAPACITIES = [None, 0, 5]


def workload(shape, dtype, prob_dtype=torch.float32):
    tokens, hidden, experts, topk, dropped = SHAPES[shape]
    generator = torch.Generator().manual_seed(13)
    routing_map = random_map(tokens, experts, topk, generator, dropped)
    data = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return data, torch.rand(tokens, experts, generator=generator).to(prob_dtype), routing_map


def padding(capacity, routing_map):
    if capacity is None:
        return {}
    return {"num_out_tokens": min(capacity, routing_map.size(0)) * routing_map.size(1), "drop_and_pad": True}


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_maps_equal_the_cpu(device, shape, capacity):
    _, _, routing_map = workload(shape, torch.float32)
    capacity = None if capacity is None else min(capacity, routing_map.size(0))
    expected = kernels.build_row_map(routing_map, capacity)
    got = kernels.build_row_map(routing_map.to(device), capacity)
    assert got.num_rows == expected.num_rows
    for name in ("offsets", "rows", "experts", "sources", "expert_counts"):
        assert_same_bits(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("samples", [1, 4])
def test_fewer_rows_than_promised_point_nowhere_else(device, samples):
    """Transformer Engine's router gives a token of NaNs one expert, whatever top-k is."""
    tokens, experts, topk = 24, 6, 3
    routing_map = random_map(tokens, experts, topk, torch.Generator().manual_seed(1), 0.0)
    routing_map[5] = routing_map[17] = torch.arange(experts) == 0
    routed = int(routing_map.sum())
    expected = kernels.build_row_map_by_sample(routing_map, samples)
    promised = kernels.build_row_map_by_sample(routing_map.to(device), samples, tokens * topk)
    assert promised.num_rows == tokens * topk > routed
    for row_map in (promised, promised.cut(4)):
        assert_same_bits(row_map.rows.sort().values, torch.arange(tokens * topk))
        assert row_map.experts.min() >= 0 and row_map.experts.max() < experts
    assert promised.sources.min() >= 0 and promised.sources.max() < tokens
    assert_same_bits(promised.expert_counts, expected.expert_counts)
    assert_same_bits(promised.sources[:routed], expected.sources)
    # Of the others, tokens and experts are as they would be without.
    kept = promised.rows < routed
    for row_map, of_expected in ((promised, expected), (promised.cut(4), expected.cut(4))):
        for name in ("rows", "experts"):
            assert_same_bits(getattr(row_map, name)[kept], getattr(of_expected, name))
    if samples == 1:  # and no token has those left over
        assert int(promised.offsets[-1]) == routed and not kept[routed:].any()


def test_row_map_from_shuffled_repeated_sources(device):
    from megatron_moe_opt.kernels.row_map import row_map_from_sources

    generator = torch.Generator().manual_seed(1)
    sources = torch.randint(0, 700, (sized(30_000, 3000),), generator=generator)
    sources[::3] = 41  # one token with many rows
    for experts in (None, 30):
        expected = row_map_from_sources(sources, 700, experts)
        got = row_map_from_sources(sources.to(device), 700, experts)
        assert_same_bits(got.offsets, expected.offsets)
        assert_same_bits(got.rows, expected.rows)
        if experts:
            assert_same_bits(got.experts, expected.experts)


def test_rows_past_the_buffer_are_no_entries(device):
    routing_map = random_map(1000, 40, 3, torch.Generator().manual_seed(2))
    full = kernels.build_row_map(routing_map)
    for size in (0, 1, 64, full.num_rows // 2, full.num_rows - 1):
        offsets, rows, experts, sources, counts = load_extension().build_row_map(routing_map.to(device), size)
        kept = full.rows < size
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        assert_same_bits(offsets, before[full.offsets])
        assert_same_bits(rows, full.rows[kept])
        assert_same_bits(experts, full.experts[kept])
        assert_same_bits(sources, full.sources[:size])
        assert torch.equal(counts.cpu(), full.expert_counts)  # of those that were cut off, too


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_cpu_bit_for_bit(device, shape, dtype, capacity):
    data, weights, routing_map = workload(shape, dtype)
    generator = torch.Generator().manual_seed(5)
    results = []
    for place in (torch.device("cpu"), device):
        tokens, probs = leaves(data.to(place), weights.to(place))
        routed = routing_map.to(place)
        permuted, permuted_probs, indices = kernels.permute(tokens, routed, probs, **padding(capacity, routing_map))
        if not results:
            grad = torch.randn(data.shape, generator=generator).to(dtype)
            grad_rows = torch.randn(permuted.shape, generator=generator).to(dtype)
            grad_probs = torch.randn(permuted_probs.shape, generator=generator)
        got = [permuted, permuted_probs, indices]
        sent = [grad_rows.to(place), grad_probs.to(place)]
        got += torch.autograd.grad([permuted, permuted_probs], [tokens, probs], sent)
        rows, merged = leaves(permuted, probs)
        for merge in ((), (merged, routed)):
            out = kernels.unpermute(rows, indices, data.shape, *merge, drop_and_pad=capacity is not None)
            got += [out, torch.autograd.grad(out, rows, grad.to(place))[0]]
        results.append(got)
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(actual.detach(), expected.detach())


@pytest.mark.parametrize("capacity", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_grad_probs_match_the_reference(device, shape, dtype, capacity):
    data, weights, routing_map = workload(shape, dtype)
    routed = routing_map.to(device)
    arguments = padding(capacity, routing_map)
    limit = arguments["num_out_tokens"] // routing_map.size(1) if arguments else None
    permuted, _, indices = kernels.permute(data.to(device), routed, **arguments)
    probs, exact = leaves(weights.to(device), weights.double())
    grad = torch.randn(data.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    out = kernels.unpermute(permuted, indices, data.shape, probs, routed, drop_and_pad=capacity is not None)
    wanted = reference.unpermute(permuted.cpu().double(), routing_map, exact, limit, sum_dtype=torch.float64)
    assert (
        relative_error(out.detach().cpu(), wanted.detach()) <= 2 * ROUNDING[dtype]
    )  # padding: thousands of rows a token
    got = torch.autograd.grad(out, probs, grad.to(device), retain_graph=True)[0]
    expected = torch.autograd.grad(wanted, exact, grad.double())[0]
    assert relative_error(got.cpu(), expected) <= 1e-6
    again = torch.autograd.grad(out, probs, grad.to(device))[0]
    assert torch.equal(got, again)


@pytest.mark.parametrize("prob_dtype", PROB_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["odd-hidden", "four-byte-rows", "common", "all-dropped"])
def test_packed_rows_equal_the_cpu(device, shape, dtype, prob_dtype):
    data, weights, routing_map = workload(shape, dtype, prob_dtype)
    results = []
    for place in (torch.device("cpu"), device):
        row_map = kernels.build_row_map(routing_map.to(place))
        packed = kernels.permute_packed(data.to(place), weights.to(place), row_map)
        sums = kernels.sum_packed_rows(packed, data.size(1), row_map)
        results.append([packed.view(torch.uint8), sums, kernels.unpermute_probs(packed, row_map, prob_dtype)])
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_a_million_tokens(device):
    num_tokens = sized(1 << 20, 1 << 13)
    routing_map = random_map(num_tokens, 8, 2, torch.Generator().manual_seed(3))
    tokens = torch.arange(num_tokens, dtype=torch.float32)[:, None].expand(-1, 4).contiguous()
    permuted, _, indices = kernels.permute(tokens.to(device), routing_map.to(device))
    expected, _, expected_indices = kernels.permute(tokens, routing_map)
    assert_same_bits(indices, expected_indices)
    assert_same_bits(permuted, expected)
    assert_same_bits(kernels.unpermute(permuted, indices, tokens.shape), 2 * tokens)


def test_bad_input_is_refused(device):
    routing_map = torch.ones(4, 2, dtype=torch.bool, device=device)
    tokens = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match=r"not contiguous"):
        kernels.permute(torch.zeros(8, 4, device=device).T, routing_map)
    with pytest.raises(ValueError, match=r"routing_map|row_map|tokens"):
        kernels.permute(tokens.cpu(), routing_map)
    with pytest.raises(ValueError, match=r"float64|Double"):
        kernels.permute(tokens.double(), routing_map)


def test_a_refused_launch_is_not_the_next_ones_error(device):
    """20,000 experts need more shared memory than any device has."""
    with pytest.raises(RuntimeError, match="shared memory for this number of experts"):
        kernels.build_row_map(torch.ones(1, 20_000, dtype=torch.bool, device=device))
    routing_map = torch.ones(3, 2, dtype=torch.bool)
    assert_same_bits(kernels.build_row_map(routing_map.to(device)).rows, kernels.build_row_map(routing_map).rows)
