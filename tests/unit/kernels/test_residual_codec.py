"""The residual codec against its plain-PyTorch reference: every k, ties, special values, block borders, threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_moe_opt import kernels
from tests import kernel_reference as reference
from tests.unit.codec_cases import BLOCK, DTYPES, FILLS, check_decode, check_encode, decode, pair, same_values
from tools.bench.kernels import CodecWorkload

SAMPLED = 70_000  # elements from which on the k-th magnitude is guessed from a sample


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_small_expert_by_hand():
    expert = torch.tensor([[1.0, -5.0, 3.0], [4.0, 4.0, 9.0]])
    shared = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 10.0]])
    # residuals 0 -6 2 3 3 -1: the three largest are -6 and 3 3; of two, the second is the first 3
    values, indices = kernels.sr_encode(expert, shared, 2)
    assert values.tolist() == [-6, 3]
    assert indices.tolist() == [2, 0, 1, 3]  # one block, ends after 2 entries; places 1 and 3
    assert decode(values, indices, shared).tolist() == [[1, -5, 1], [4, 1, 10]]


def test_block_ends_by_hand():
    """The second block is full, with more entries than a word holds; the third has none, the fourth is short."""
    expert = torch.zeros(3 * BLOCK + 5)
    expert[[7, BLOCK - 1]] = 3.0
    expert[BLOCK : 2 * BLOCK] = 1.0
    expert[-1] = -2.0
    values, indices = kernels.sr_encode(expert, torch.zeros_like(expert), BLOCK + 3)
    ends = [2, BLOCK + 2, BLOCK + 2, BLOCK + 3]
    assert indices[:8].tolist() == [word for end in ends for word in (end % BLOCK, end // BLOCK)]
    assert indices[8:12].tolist() == [7, BLOCK - 1, 0, 1]
    assert indices[-2:].tolist() == [BLOCK - 1, 4]
    assert values[[0, 2, -1]].tolist() == [3, 1, -2]
    check_decode(values, indices, torch.zeros_like(expert), torch.empty_like(expert))


@settings(max_examples=60)
@given(st.data())
def test_small_experts_match_the_reference(data):
    numel = data.draw(st.integers(0, 200))
    seed = data.draw(st.integers(0, 2**31))
    expert, shared = pair(numel, data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(sorted(FILLS))), seed)
    for k in {0, 1, numel // 3, max(0, numel - 1), numel, data.draw(st.integers(0, numel))} & set(range(numel + 1)):
        values, indices = check_encode(expert, shared, k)
        out = torch.full((numel + 7,), 77.0, dtype=expert.dtype)
        offset = data.draw(st.integers(0, 7))
        check_decode(values, indices, shared, out[offset : offset + numel])
        rest = torch.cat([out[:offset], out[offset + numel :]])
        assert torch.equal(rest, torch.full_like(rest, 77.0))


@settings(max_examples=6)
@given(
    st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, SAMPLED + 3, 2 * BLOCK, 3 * BLOCK + 17]),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(FILLS)),
    st.one_of(st.floats(0, 1), st.sampled_from([0.02, 1e-5, 0.999])),
    st.integers(0, 2**31),
)
@example(3 * BLOCK + 17, torch.float32, "clustered", 0.02, 1)
@example(3 * BLOCK + 17, torch.float32, "random", 0.0001, 1)
def test_experts_of_several_blocks_match_the_reference(numel, dtype, fill, share, seed):
    expert, shared = pair(numel, dtype, fill, seed)
    values, indices = check_encode(expert, shared, math.ceil(share * numel))
    check_decode(values, indices, shared, torch.empty_like(shared))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(cpu_kernels, dtype):
    for fill in FILLS:
        nearly_all = [(SAMPLED + 29, SAMPLED)] if fill == "ties" else []
        for numel, k in [(0, 0), (5, 2), (67, 30), (SAMPLED + 29, 1500), *nearly_all]:
            expert, shared = pair(numel, dtype, fill, seed=numel)
            values, indices = check_encode(expert, shared, k)
            check_decode(values, indices, shared, torch.empty_like(shared))


def test_any_number_of_threads_gives_the_same_bits(threads):
    for fill in ("random", "ties", "clustered", "special"):
        expert, shared = pair(5 * BLOCK + 11, torch.float32, fill, seed=3)
        for k in (1, 4000, 3 * BLOCK):
            outcomes = set()
            for count in (1, 2, 3, 8):
                threads(count)
                values, indices = kernels.sr_encode(expert, shared, k)
                decoded = decode(values, indices, shared)
                outcomes.add(tuple(t.view(torch.uint8).numpy().tobytes() for t in (values, indices, decoded)))
            assert len(outcomes) == 1


def test_large_residuals_that_the_sample_misses():
    """All of them lie in three rows: the guess is too high, and is lowered until there are enough."""
    expert = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(1)) * 1e-3
    expert[[100, 500, 900]] += 1
    shared = torch.zeros_like(expert)
    for k in (3 * 1024, 4 * 1024, 30 * 1024):
        check_encode(expert, shared, k)


def test_round_trip_is_exact_where_the_difference_is():
    """Differences of numbers with few bits are exact, so kept entries come back as they were, the others as shared."""
    generator = torch.Generator().manual_seed(5)
    for dtype in DTYPES:
        expert = torch.randint(-64, 65, (300, 300), generator=generator).to(dtype) / 32
        shared = torch.randint(-64, 65, (300, 300), generator=generator).to(dtype) / 32
        values, indices = kernels.sr_encode(expert, shared, 2000)
        kept = reference.sr_entries(indices, expert.numel())
        decoded = decode(values, indices, shared).flatten()
        assert torch.equal(decoded[kept], expert.flatten()[kept])
        decoded[kept] = shared.flatten()[kept]
        assert torch.equal(decoded, shared.flatten())
        full = kernels.sr_encode(expert, shared, expert.numel())
        assert torch.equal(decode(*full, shared), expert)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_sum_gives_is_sent_whole(dtype):
    """A shared element that is not finite, an element that is not, and a residual that overflows; in every place of a
    vector, so that they meet others."""
    large, inf, nan = 0.9 * torch.finfo(dtype).max, torch.inf, torch.nan
    pairs = [(1.5, nan), (-2.5, inf), (0.0, -inf), (large, nan), (nan, 1.0), (inf, -1.0), (-inf, inf), (inf, inf)]
    pairs += [(nan, nan), (large, -large), (-large, large), (large / 4, -large), (-3.0, 2.0)]
    expert, shared = (torch.tensor(numbers, dtype=dtype).repeat(7) for numbers in zip(*pairs, strict=True))
    values, indices = check_encode(expert, shared, expert.numel())
    check_decode(values, indices, shared, torch.empty_like(shared))
    same_values(decode(values, indices, shared), expert)
    first = kernels.sr_encode(expert, shared, 12 * 7)  # they are the largest, so that none of them waits
    decoded = decode(*first, shared)
    sent_whole = torch.arange(expert.numel()) % len(pairs) != len(pairs) - 1
    same_values(decoded[sent_whole], expert[sent_whole])


def test_a_residual_that_rounding_takes_past_the_largest_number():
    """65456 is a tie that rounds up to 65472, of which with 48 the sum would be infinite."""
    expert, shared = (torch.tensor(numbers, dtype=torch.float16) for numbers in ([65504.0, -65504.0], [48.0, -48.0]))
    values, indices = check_encode(expert, shared, 2)
    assert values.tolist() == [65440, -65440]
    check_decode(values, indices, shared, torch.empty_like(shared))
    assert decode(values, indices, shared).isfinite().all()


@torch.no_grad()
def test_decode_into_the_weight_of_a_module():
    module = torch.nn.Linear(24, 40)
    expert, shared = torch.randn(2, 40, 24)
    values, indices = kernels.sr_encode(expert, shared, 100)
    version = module.weight._version
    kernels.sr_decode(values, indices, module.weight.copy_(shared))
    assert torch.equal(module.weight, reference.sr_decode(values, indices, shared))
    assert module.weight._version > version  # autograd can tell that what it saved has changed


def test_bytes_on_the_wire():
    numel = 8 * 2**20
    for dtype, ratio in ((torch.float32, 100 / 3), (torch.bfloat16, 25)):
        dense = numel * dtype.itemsize
        assert dense / kernels.sr_wire_bytes(numel, numel // 50, dtype) == pytest.approx(ratio, rel=2e-3)
    expert = torch.randn(BLOCK + 1).bfloat16()
    sent = kernels.sr_encode(expert, torch.zeros_like(expert), 9)
    assert sum(t.nbytes for t in sent) == kernels.sr_wire_bytes(expert.numel(), 9, expert.dtype) == 9 * 4 + 2 * 4
    assert sent[1].numel() == kernels.sr_index_words(expert.numel(), 9)


def test_the_benchmark_counts_every_byte_once():
    rows = CodecWorkload(torch.device("cpu"), 1000, 20, "bf16", seed=1).measure(repeats=2)
    rows += CodecWorkload(torch.device("cpu"), 1000, 20, "bf16", 1, learning_rate=1e-4).measure(repeats=2)
    assert [row.op for row in rows] == ["encode", "decode", "encode, after a step", "decode, after a step"]
    for row in rows:
        assert row.moved_bytes == 20 * 4 + 4 + (2 * 2000 if row.op.startswith("encode") else 2 * 40)
        assert 0 < row.ours.low <= row.ours.median <= row.ours.high
        assert row.report()["speedup"] == row.stock.median / row.ours.median


EXPERT = torch.arange(12.0).view(3, 4)
SHARED, MEMORY = torch.zeros(3, 4), torch.zeros(12)
VALUES, INDICES = kernels.sr_encode(EXPERT, SHARED, 4)  # the places are 8 to 11


def forged(*words):
    return torch.tensor(words, dtype=torch.uint16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.sr_encode(EXPERT.double(), SHARED.double(), 1), "expert is Double: only float32, bfloat16"),
        (lambda: kernels.sr_encode(EXPERT, SHARED.bfloat16(), 1), r"shared is BFloat16 of shape \[3, 4\], but expert"),
        (lambda: kernels.sr_encode(EXPERT, SHARED.view(4, 3), 1), r"shared is .* of shape \[4, 3\], but expert is"),
        (lambda: kernels.sr_encode(EXPERT, SHARED.flatten(), 1), r"shared must have 2 dimension"),
        (lambda: kernels.sr_encode(EXPERT.T, SHARED.T, 1), r"expert .* is not contiguous: pass expert.contiguous"),
        (lambda: kernels.sr_encode(EXPERT, torch.zeros(4, 3).T, 1), "shared .* is not contiguous"),
        (lambda: kernels.sr_encode(EXPERT, SHARED.to("meta"), 1), "shared is on meta, where nothing has values"),
        (lambda: kernels.sr_encode(EXPERT, SHARED, -1), "k is negative: -1"),
        (lambda: kernels.sr_encode(EXPERT, SHARED, 13), r"k 13 must lie in \[0, 12\]"),
        (lambda: kernels.sr_decode(VALUES, INDICES, SHARED.bfloat16()), "values are Float, but expert is BFloat16"),
        (lambda: kernels.sr_decode(VALUES, INDICES.to(torch.int32), SHARED), "indices must be uint16, but are Int"),
        (lambda: kernels.sr_decode(VALUES[:3].clone(), INDICES, SHARED), "3 values with 6 indices do not belong"),
        (lambda: kernels.sr_decode(torch.ones(13), forged(*range(15)), SHARED), "13 values with 15 indices"),
        (lambda: kernels.sr_decode(VALUES, INDICES, torch.empty(4, 3).T), "expert .* is not contiguous"),
        (lambda: kernels.sr_decode(MEMORY[:4], INDICES, MEMORY), "expert shares memory with values"),
        (lambda: kernels.sr_decode(VALUES, forged(3, 0, 8, 9, 10, 11), SHARED), "are not what sr_encode writes"),
        (lambda: kernels.sr_decode(VALUES, forged(4, 1, 8, 9, 10, 11), SHARED), "are not what sr_encode writes"),
        (lambda: kernels.sr_decode(VALUES, forged(4, 0, 8, 9, 10, 12), SHARED), "are not what sr_encode writes"),
        (lambda: kernels.sr_decode(VALUES, forged(4, 0, 8, 9, 9, 11), SHARED), "are not what sr_encode writes"),
        (lambda: kernels.sr_decode(VALUES, forged(4, 0, 8, 60000, 10, 11), SHARED), "are not what sr_encode writes"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_too_many_elements_are_refused():
    huge = torch.empty(2**31, dtype=torch.bfloat16)  # never touched
    with pytest.raises(
        ValueError, match="expert has 2147483648 elements: the codec takes at most 2147483647; split it"
    ):
        kernels.sr_encode(huge, huge, 1)
