"""Experts and comparisons for the tests of the residual codec, on CPU and on CUDA."""

from __future__ import annotations

import torch

from megatron_moe_opt import kernels
from tests import kernel_reference as reference

BLOCK = 65536
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(numel, generator):
    return torch.randn(numel, generator=generator)


def _ties(numel, generator):
    return torch.randint(-3, 4, (numel,), generator=generator).float()


def _clustered(numel, generator):
    """Returns an expert in which nearly all large values lie side by side."""
    data = torch.randn(numel, generator=generator) * 1e-3
    data[numel // 2 : numel // 2 + numel // 40] *= 1e6
    return data


def _denormal(numel, generator):
    return torch.randint(-40, 41, (numel,), generator=generator).float() * 1e-45


def _special(numel, generator):
    values = torch.tensor([0.0, -0.0, 1e-45, 65504.0, 3e38, float("inf"), -float("inf"), float("nan"), -1.0])
    return values[torch.randint(0, values.numel(), (numel,), generator=generator)]


FILLS = {
    "random": _random,
    "ties": _ties,
    "clustered": _clustered,
    "denormal": _denormal,
    "special": _special,
    "equal": lambda numel, generator: torch.full((numel,), 0.5),
    "zero": lambda numel, generator: torch.zeros(numel),
}


def pair(numel, dtype, fill, seed):
    """An expert and a shared expert."""
    generator = torch.Generator().manual_seed(seed)
    expert = FILLS[fill](numel, generator)
    shared = torch.zeros(numel) if fill in ("equal", "ties", "clustered") else FILLS[fill](numel, generator)
    return expert.to(dtype), shared.to(dtype)


def same_values(actual, expected):
    """Equal bits, except that a NaN may be any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = {4: torch.int32, 2: torch.int16}[actual.element_size()]
    assert torch.equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


def check_encode(expert, shared, k):
    """Encodes, and compares with the reference."""
    values, indices = kernels.sr_encode(expert, shared, k)
    expected_values, expected_indices = reference.sr_encode(expert.cpu(), shared.cpu(), k)
    assert indices.dtype == torch.uint16
    assert torch.equal(indices.cpu().view(torch.int16), expected_indices.view(torch.int16))
    same_values(values, expected_values)
    return values, indices


def decode(values, indices, shared):
    """Returns the expert that values and indices stand for, in new memory."""
    expert = shared.clone()
    kernels.sr_decode(values, indices, expert)
    return expert


def check_decode(values, indices, shared, out):
    """Decodes in the memory of `out`, and compares with the reference."""
    kernels.sr_decode(values, indices, out.copy_(shared))
    same_values(out, reference.sr_decode(values.cpu(), indices.cpu(), shared.cpu()))
