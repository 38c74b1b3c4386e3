"""Kernels run on the current stream, forward and backward, and do not stop the host."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import ChunkList
from tests.gpu import sized
from tests.unit.permute_cases import random_map

SPIN = 200_000_000  # cycles: about 0.1 s, long against every kernel of these tests
TOKENS, HIDDEN, EXPERTS, TOPK = sized(512, 64), 256, 16, 4


def routing(device, seed=0):
    return random_map(TOKENS, EXPERTS, TOPK, torch.Generator().manual_seed(seed)).to(device)


def test_kernels_wait_for_the_current_stream(device):
    """The input arrives late on a side stream: a kernel on any other stream would read what was there before."""
    routing_map = routing(device)
    fresh = torch.randn(TOKENS, HIDDEN, device=device)
    fresh_probs = torch.rand(TOKENS, EXPERTS, device=device)
    chunks = ChunkList.from_counts([TOKENS] * TOPK, list(reversed(range(TOPK))), device)
    late, late_probs = torch.zeros_like(fresh), torch.zeros_like(fresh_probs)
    late_map = torch.zeros_like(routing_map)
    results = []
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream, spin in ((side, SPIN), (torch.cuda.current_stream(), 0)):
        with torch.cuda.stream(stream):
            tokens = late.detach().requires_grad_()
            probs = late_probs.detach().requires_grad_()
            if spin:
                torch.cuda._sleep(spin)
            late.copy_(fresh)
            late_probs.copy_(fresh_probs)
            late_map.copy_(routing_map)
            permuted, permuted_probs, indices = kernels.permute(tokens, late_map, probs, TOKENS * TOPK)
            moved = kernels.copy_chunks(permuted.detach(), chunks)
            out = kernels.unpermute(permuted, indices, fresh.shape, probs, late_map)
            grads = torch.autograd.grad([out, permuted_probs], [tokens, probs], [fresh, permuted_probs.detach()])
        stream.synchronize()
        results.append([t.detach().clone() for t in (permuted, permuted_probs, indices, moved, out, *grads)])
        for stale in (late, late_probs, late_map):
            stale.zero_()
        torch.cuda.synchronize()
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert results[0][0].abs().sum() > 0


def test_two_streams_do_not_disturb_each_other(device):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [(torch.randn(TOKENS, HIDDEN, device=device), routing(device, seed)) for seed in (1, 2)]
    expected = []
    for tokens, routing_map in inputs:
        permuted, _, indices = kernels.permute(tokens, routing_map)
        expected.append(kernels.unpermute(permuted, indices, tokens.shape))
    torch.cuda.synchronize()
    for _ in range(sized(50, 2)):
        outputs = []
        for stream, (tokens, routing_map) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                permuted, _, indices = kernels.permute(tokens, routing_map, num_out_tokens=TOKENS * TOPK)
                outputs.append(kernels.unpermute(permuted, indices, tokens.shape))
        torch.cuda.synchronize()
        assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))


def test_a_known_number_of_rows_spares_the_host_synchronisation(device):
    routing_map = routing(device)
    tokens = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, device=device, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        permuted, _, indices = kernels.permute(tokens, routing_map, probs, TOKENS * TOPK)
        out = kernels.unpermute(permuted, indices, tokens.shape, probs, routing_map)
        out.backward(out.detach())
        kernels.permute(tokens, routing_map, probs, TOKENS // 2 * EXPERTS, drop_and_pad=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            kernels.permute(tokens, routing_map, probs)  # the rows must be counted: the mode does see one
    finally:
        torch.cuda.set_sync_debug_mode("default")
