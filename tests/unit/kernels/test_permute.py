"""permute and unpermute against the plain-PyTorch reference and against Megatron-Core's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from megatron_moe_opt import kernels
from tests import kernel_reference as reference
from tests.unit.permute_cases import (
    DTYPES,
    PROB_DTYPES,
    ROUNDING,
    equal_bits,
    leaves,
    random_map,
    relative_error,
    workloads,
)


def padding_arguments(routing_map, capacity):
    """The arguments of Megatron-Core's interface that stand for a capacity."""
    if capacity is None:
        return {}
    return {"num_out_tokens": capacity * routing_map.size(1), "drop_and_pad": True}


def test_rows_of_a_small_map_by_hand():
    #          expert 0  1  2
    # token 0:        x  .  x        rows: expert 0 -> tokens 0, 2 (rows 0, 1)
    # token 1:        .  .  .              expert 1 -> token  2    (row  2)
    # token 2:        x  x  .              expert 2 -> token  0    (row  3)
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)
    tokens = torch.tensor([[10.0], [20.0], [30.0]])
    probs = torch.arange(9.0).view(3, 3)
    permuted, permuted_probs, indices = kernels.permute(tokens, routing_map, probs)
    assert permuted.flatten().tolist() == [10, 30, 30, 10]
    assert permuted_probs.tolist() == [0, 6, 7, 2]
    assert indices.tolist() == [0, 2, 2, 0]
    row_map = kernels.build_row_map(routing_map)
    assert row_map.offsets.tolist() == [0, 2, 2, 4]
    assert row_map.rows.tolist() == [0, 3, 1, 2]
    assert row_map.experts.tolist() == [0, 2, 0, 1]
    assert row_map.expert_counts.tolist() == [2, 1, 1]
    assert kernels.unpermute(permuted, indices, tokens.shape).flatten().tolist() == [20, 0, 60]


def test_padding_of_a_small_map_by_hand():
    # Capacity 2. Expert 0 is over-full (tokens 0, 1, 3: token 3 is cut); expert 1 has token 2 and is padded with the
    # lowest token that is not routed to it, token 0.
    routing_map = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    probs = torch.arange(8.0).view(4, 2)
    permuted, permuted_probs, indices = kernels.permute(tokens, routing_map, probs, 4, drop_and_pad=True)
    assert indices.tolist() == [0, 1, 2, 0]
    assert permuted.flatten().tolist() == [1, 2, 3, 1]
    assert permuted_probs.tolist() == [0, 2, 5, 1]
    out = kernels.unpermute(permuted, indices, (4, 1), probs, routing_map, drop_and_pad=True)
    assert out.flatten().tolist() == [1 * 0 + 1 * 1, 2 * 2, 3 * 5, 0]


@settings(max_examples=60)
@given(workloads())
def test_permute_moves_bits_as_the_reference_does(case):
    tokens, probs, routing_map, capacity = case
    torch.manual_seed(tokens.numel())
    mine, theirs = leaves(tokens, probs), leaves(tokens, probs)
    got = kernels.permute(mine[0], routing_map, mine[1], **padding_arguments(routing_map, capacity))
    expected = reference.permute(theirs[0], routing_map, theirs[1], capacity)
    for actual, wanted in zip(got, expected, strict=True):
        assert torch.equal(actual, wanted)
    grads = [torch.randn(out.shape).to(out.dtype) for out in expected[:2]]
    got_grads = torch.autograd.grad(got[:2], mine, grads)
    exact = [tensor.double().requires_grad_() for tensor in (tokens, probs)]
    exact_out = reference.permute(exact[0], routing_map, exact[1], capacity)
    exact_grads = torch.autograd.grad(exact_out[:2], exact, [g.double() for g in grads], retain_graph=True)
    magnitudes = torch.autograd.grad(exact_out[:2], exact, [g.double().abs() for g in grads])
    assert relative_error(got_grads[0], exact_grads[0], magnitudes[0]) <= ROUNDING[tokens.dtype]
    assert torch.equal(got_grads[1].double(), exact_grads[1])
    if tokens.dtype == torch.float32:  # the same sums in the same order
        assert torch.equal(got_grads[0], torch.autograd.grad(expected[:2], theirs, grads)[0])


@settings(max_examples=60)
@given(workloads())
def test_unpermute_matches_the_reference(case):
    tokens, probs, routing_map, capacity = case
    torch.manual_seed(tokens.numel())
    permuted, _, indices = kernels.permute(tokens, routing_map, **padding_arguments(routing_map, capacity))
    permuted = torch.randn(permuted.shape).to(tokens.dtype)
    grad = torch.randn(tokens.shape).to(tokens.dtype)
    padded = capacity is not None
    for weights in (None, probs):
        inputs = [permuted] if weights is None else [permuted, weights]
        mine, theirs, exact = leaves(*inputs), leaves(*inputs), leaves(*[t.double() for t in inputs])
        absolute = leaves(*[t.double().abs() for t in inputs])
        map_argument = None if weights is None else routing_map
        got = kernels.unpermute(
            mine[0], indices, tokens.shape, *mine[1:], routing_map=map_argument, drop_and_pad=padded
        )
        expected = reference.unpermute(theirs[0], routing_map, *theirs[1:], capacity=capacity)
        wanted, magnitude = (
            reference.unpermute(rows, routing_map, *w, capacity=capacity, sum_dtype=torch.float64)
            for rows, *w in (exact, absolute)
        )
        assert got.dtype == tokens.dtype
        got_grads = torch.autograd.grad(got, mine, grad)
        wanted_grads = torch.autograd.grad(wanted, exact, grad.double())
        magnitudes = torch.autograd.grad(magnitude, absolute, grad.double().abs())
        assert relative_error(got, wanted, magnitude) <= ROUNDING[tokens.dtype]
        assert relative_error(got_grads[0], wanted_grads[0]) <= ROUNDING[tokens.dtype]
        if weights is not None:
            assert got_grads[1].dtype == weights.dtype
            assert relative_error(got_grads[1], wanted_grads[1], magnitudes[1]) <= ROUNDING[weights.dtype]
        assert torch.equal(got, expected)  # the same float32 sums in the same order, rounded once
        expected_grads = torch.autograd.grad(expected, theirs, grad)
        assert torch.equal(got_grads[0], expected_grads[0])


@pytest.mark.parametrize("capacity", [None, 40, 200])
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_megatron_core(dtype, with_probs, capacity, cpu_kernels):
    from megatron.core.transformer.moe import moe_utils

    generator = torch.Generator().manual_seed(7)
    num_tokens, hidden, num_experts = 300, 67, 12
    routing_map = random_map(num_tokens, num_experts, 3, generator, dropped=0.1)
    data = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, num_experts, generator=generator)
    grad = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    results = []
    for library in (kernels, moe_utils):
        tokens, probs = leaves(data, weights)
        arguments = {"num_out_tokens": int(routing_map.sum())} | padding_arguments(routing_map, capacity)
        # From 0.17 on Megatron-Core returns two more, which serve padding for quantization.
        permuted, permuted_probs, indices, *_ = library.permute(tokens, routing_map, probs, **arguments)
        merge = (probs, routing_map) if with_probs else (None, None)
        out = library.unpermute(permuted, indices, data.shape, *merge, drop_and_pad=capacity is not None)
        loss = permuted_probs.square().sum() if not with_probs else 0
        grads = torch.autograd.grad(
            [out, loss] if not with_probs else [out],
            [tokens, probs],
            [grad, torch.tensor(1.0)] if not with_probs else [grad],
        )
        results.append((permuted, permuted_probs, indices, out, *grads))
    mine, theirs = results
    for actual, wanted in zip(mine[:3], theirs[:3], strict=True):
        assert torch.equal(actual, wanted)
    if dtype == torch.float32:
        assert torch.equal(mine[3], theirs[3])
        assert torch.equal(mine[4], theirs[4])
    # Megatron-Core rounds to the dtype after each addition, once for each expert of a token.
    bound = 4 * ROUNDING[dtype]
    assert relative_error(mine[3], theirs[3]) <= bound
    assert relative_error(mine[4], theirs[4]) <= bound
    assert relative_error(mine[5], theirs[5]) <= (bound if with_probs else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value_survives(dtype, cpu_kernels):
    """Each of the 65,536 bit patterns through the float32 sum and back: exact, NaN stays NaN."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 256)
    everywhere = torch.ones(values.size(0), 1, dtype=torch.bool)
    permuted, _, indices = kernels.permute(values, everywhere)
    assert torch.equal(permuted.view(torch.int16), values.view(torch.int16))
    out = kernels.unpermute(permuted, indices, values.shape)
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype, cpu_kernels):
    """prob * 1 with float32 probs of every exponent: the result is PyTorch's rounding of the prob."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4096, 4), generator=generator).to(torch.int32)
    bits[:, 1] &= -(2**16)  # exact in bfloat16
    bits[:, 2] = bits[:, 2] & -(2**16) | 0x8000  # halfway in bfloat16
    bits[:, 3] = (bits[:, 3] & 0x0FFFE000) + 0x30001000  # halfway in float16, normals and denormals
    probs = bits.view(torch.float32)
    routing_map = torch.ones(4096, 4, dtype=torch.bool)
    rows = torch.zeros(4 * 4096, 4 * 37, dtype=dtype)
    for expert in range(4):
        rows[expert * 4096 : (expert + 1) * 4096, expert * 37 : (expert + 1) * 37] = 1
    indices = torch.arange(4096).repeat(4)
    got = kernels.unpermute(rows, indices, (4096, 4 * 37), probs, routing_map).view(4096, 4, 37)
    finite = probs.isfinite().all(dim=1)  # 0 * inf of another expert is NaN
    expected = (probs + 0.0).to(dtype)[:, :, None].expand_as(got)
    assert torch.equal(got[finite], expected[finite])
    assert got[probs.isnan().any(dim=1)].isnan().any(dim=2).any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prob_dtype", PROB_DTYPES)
def test_large_outputs_that_bypass_the_caches(dtype, prob_dtype, cpu_kernels):
    """Outputs are over the size where the kernels switch to non-temporal stores, with a hidden size that is no multiple
    of any vector and with an aligned one.
    """
    from megatron_moe_opt.kernels.packed_rows import LANE_BYTES

    generator = torch.Generator().manual_seed(5)
    if dtype != torch.float32 and prob_dtype != torch.float32:
        pytest.skip("one probability dtype is enough for each further dtype")
    for hidden in (1024, 1037) if prob_dtype == torch.float32 else (1037,):
        routing_map = random_map(3000, 16, 7, generator)
        tokens = torch.randn(3000, hidden, generator=generator).to(dtype)
        probs = torch.rand(3000, 16, generator=generator).to(prob_dtype)
        permuted, permuted_probs, indices = kernels.permute(tokens, routing_map, probs)
        assert torch.equal(permuted, tokens[indices])
        packed = kernels.permute_packed(tokens, probs, kernels.build_row_map(routing_map))
        assert equal_bits(packed, reference.pack(permuted, permuted_probs, LANE_BYTES))
    del packed


def test_large_sums_that_bypass_the_caches(cpu_kernels):
    for dtype, hidden in ((torch.float32, 4096), (torch.bfloat16, 8192)):
        tokens = torch.randn(2500, hidden).to(dtype).requires_grad_()
        routing_map = torch.ones(2500, 2, dtype=torch.bool)
        probs = torch.rand(2500, 2).requires_grad_()
        permuted, _, indices = kernels.permute(tokens, routing_map)
        out = kernels.unpermute(permuted, indices, tokens.shape, probs, routing_map)
        wide = tokens.detach().float()
        expected = (0 + wide * probs[:, :1] + wide * probs[:, 1:]).to(dtype)
        assert torch.equal(out, expected)
        grad_tokens, grad_probs = torch.autograd.grad(out, [tokens, probs], torch.ones_like(out))
        scaled = probs.detach().to(dtype).float()
        assert torch.equal(grad_tokens, (scaled[:, :1] + scaled[:, 1:]).to(dtype).expand_as(tokens))
        assert relative_error(grad_probs, wide.double().sum(1, keepdim=True).expand(-1, 2)) <= 1e-5


def test_results_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(11)
    routing_map = random_map(5000, 33, 4, generator, dropped=0.2)
    tokens, probs = torch.randn(5000, 129, generator=generator), torch.rand(5000, 33, generator=generator)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            x, p = leaves(tokens, probs)
            permuted, permuted_probs, indices = kernels.permute(x, routing_map, p)
            out = kernels.unpermute(permuted, indices, x.shape, p, routing_map)
            results.append((permuted, permuted_probs, indices, out, *torch.autograd.grad(out, [x, p], tokens)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
