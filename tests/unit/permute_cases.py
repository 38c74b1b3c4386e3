"""Routing maps and comparisons for the permutation tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from megatron_moe_opt.extension import load_extension

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROB_DTYPES = [*DTYPES, torch.float64]
CPU_KERNELS = [name for name in ("generic", "avx2", "avx512") if load_extension().select_cpu_kernels(name)]
load_extension().select_cpu_kernels("best")

# Relative error (norm of the difference over the norm) of one rounding to the dtype.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-6}


def random_map(num_tokens, num_experts, topk, generator, dropped=0.0):
    """Each token to min(topk, experts) experts, then each pair dropped with probability `dropped`."""
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    chosen = scores.topk(min(topk, num_experts)).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)
    return routing_map & (torch.rand(routing_map.shape, generator=generator) >= dropped)


def relative_error(actual, expected, magnitude=None):
    """Norm of the difference over the norm of `magnitude`, in float64; 0 where all are zero or empty.

    magnitude: the sums of the terms' absolute values, where terms can cancel; the expected values by default.
    """
    actual, expected = actual.double(), expected.double()
    norm = (expected if magnitude is None else magnitude).norm()
    return float((actual - expected).norm() / norm) if norm > 0 else float(actual.norm())


@st.composite
def workloads(draw, dtypes=tuple(DTYPES)):
    """tokens, probs, routing_map and capacity (or None): every size may be small, odd, or zero."""
    num_tokens = draw(st.integers(0, 40))
    num_experts = draw(st.integers(1, 20))
    hidden = draw(st.sampled_from([1, 3, 8, 31, 64, 65, 130, 257]))
    topk = draw(st.integers(0, 8))
    dropped = draw(st.sampled_from([0.0, 0.3, 1.0]))
    capacity = draw(st.none() | st.integers(0, num_tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = torch.randn(num_tokens, hidden, generator=generator).to(draw(st.sampled_from(dtypes)))
    probs = torch.rand(num_tokens, num_experts, generator=generator).to(draw(st.sampled_from(PROB_DTYPES)))
    return tokens, probs, random_map(num_tokens, num_experts, topk, generator, dropped), capacity


def leaves(*tensors):
    """Copies that record gradients."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def equal_bits(actual, expected):
    """Equality of packed rows, whose lanes may read as NaN."""
    return actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
