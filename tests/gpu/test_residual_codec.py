"""The residual codec on CUDA: the bits of the reference and of the CPU, whatever the sample of the encoder found."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels
from tests.gpu import EMULATED, sized
from tests.gpu.test_streams import SPIN
from tests.unit.codec_cases import BLOCK, DTYPES, FILLS, check_decode, check_encode, decode, pair, same_values

# Elements and kept entries. The sample is used from 16,384 elements on; vectors need a multiple of 16 bytes.
BLOCKS = sized(5, 1)
SIZES = {
    "nothing": (0, 0),
    "one": (1, 1),
    "odd": (4097, 80),
    "all": (10_000, 10_000),
    "few": (sized(2, 1) * BLOCK + 64, 3),
    "blocks": (BLOCKS * BLOCK + 64, BLOCKS * BLOCK // 50),
    "odd-blocks": (BLOCKS * BLOCK + 17, BLOCKS * BLOCK // 50),
    "most": sized((2 * BLOCK, 2 * BLOCK - 1000), (20_000, 19_000)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference(device, size, fill, dtype):
    numel, k = SIZES[size]
    expert, shared = (t.to(device) for t in pair(numel, dtype, fill, seed=numel))
    values, indices = check_encode(expert, shared, k)
    check_decode(values, indices, shared, torch.empty_like(shared))


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_start_anywhere(device, dtype, offset):
    numel = BLOCK + 512
    expert, shared, out = torch.randn(3, numel + 16, device=device).to(dtype)[:, offset : offset + numel]
    around = out.clone()
    values, indices = check_encode(expert, shared, numel // 20)
    check_decode(values, indices, shared, out)
    assert not torch.equal(out, around)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_expert_equals_the_cpu_again_and_again(device, dtype):
    numel = sized(8 * 2**20, 2**18) + 8
    expert, shared = pair(numel, dtype, "random", seed=1)
    expected = kernels.sr_encode(expert, shared, numel // 50)
    decoded = decode(*expected, shared)
    expert, shared = expert.to(device), shared.to(device)
    for _ in range(sized(5, 2)):
        values, indices = kernels.sr_encode(expert, shared, numel // 50)
        assert torch.equal(indices.cpu().view(torch.int16), expected[1].view(torch.int16))
        same_values(values, expected[0])
        same_values(decode(values, indices, shared), decoded)


@pytest.mark.skipif(EMULATED, reason="tests/emulator/cases.py has it with fewer blocks: second_round")
def test_blocks_of_the_encoder_go_round_a_second_time(device):
    """512 of them, of which each takes 256 segments of 1024 elements a round."""
    numel = 512 * 256 * 1024 + 5 * 1024 + 3
    generator = torch.Generator(device).manual_seed(1)
    expert = torch.randn(numel, generator=generator, dtype=torch.bfloat16, device=device)
    shared = torch.zeros_like(expert)
    values, indices = kernels.sr_encode(expert, shared, numel // 50)
    expected = kernels.sr_encode(expert.cpu(), shared.cpu(), numel // 50)
    assert torch.equal(indices.cpu().view(torch.int16), expected[1].view(torch.int16))
    same_values(values, expected[0])


def test_large_residuals_that_the_sample_misses(device):
    """All of them lie in three rows: their segments' lists overflow, and the guess may be too high."""
    rows = sized(1024, 128)
    expert = torch.rand(rows, 1024, generator=torch.Generator().manual_seed(1)).to(device) * 1e-3
    expert[[rows // 10, rows // 2, rows // 10 * 9]] += 1
    for k in (3 * 1024, 4 * 1024, 30 * 1024):
        check_encode(expert, torch.zeros_like(expert), k)


def test_waits_for_the_current_stream_but_not_the_host(device):
    fresh, shared = torch.randn(2, 512, 1024, device=device)
    late, out = torch.zeros_like(fresh), shared.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            late.copy_(fresh)
            values, indices = kernels.sr_encode(late, shared, 5000)
            kernels.sr_decode(values, indices, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    expected = kernels.sr_encode(fresh, shared, 5000)
    assert torch.equal(indices.view(torch.int16), expected[1].view(torch.int16))
    same_values(values, expected[0])
    same_values(out, decode(*expected, shared))


def test_forged_indices_reach_no_other_memory(device, races_allowed):
    """What lies around the tensors stays; compute-sanitizer's memcheck and the emulator see reads too.

    Entries that name one place twice race for it: not a case for racecheck.
    """
    numel, k = BLOCK + 100, 64
    around = torch.full((3 * numel,), 7.0, device=device)
    expert = around[numel : 2 * numel]
    values = torch.ones(k, device=device)
    for word in (0xFFFF, 0x8000, 101):
        indices = torch.full((kernels.sr_index_words(numel, k),), word, dtype=torch.int32, device=device)
        kernels.sr_decode(values, indices.to(torch.uint16), expert)
        assert (around[:numel] == 7).all() and (around[2 * numel :] == 7).all()
