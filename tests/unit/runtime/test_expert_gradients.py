"""Gradients that return compressed: nothing is lost, only late."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.runtime.travelling_experts.expert_codec import ResidualMessages
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, encode, sum_messages

DTYPES = (torch.float32, torch.bfloat16)


def arrives(messages: ResidualMessages, gradient: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """What a receiver makes of one message, float32 [numel]."""
    message = torch.empty(messages.num_bytes, dtype=torch.uint8)
    encode(messages, gradient, kept, message)
    return total_of(messages, [torch.zeros_like(gradient), message], 0)


def total_of(messages: ResidualMessages, of_ranks: list[torch.Tensor], rank: int) -> torch.Tensor:
    total = torch.full((of_ranks[rank].numel(),), torch.nan)
    sum_messages(messages, of_ranks, rank, total)
    return total


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_local=st.integers(1, 3),
    numel=st.integers(1, 300),
    ratio=st.floats(0.5, 60),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1 << 30),
)
def test_what_arrives_and_what_is_kept_is_all_there_was(dtype, num_local, numel, ratio, steps, seed):
    """Exactly: whole numbers below 2^24, which float32 adds without rounding, with more digits than bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    messages = CompressedGradients(num_local, ratio).messages(num_local * numel, dtype)
    kept, arrived, total = (torch.zeros(num_local * numel) for _ in range(3))
    for _ in range(steps):
        gradient = torch.randint(-(2**15), 2**15, (num_local * numel,), generator=generator).to(dtype)
        total += gradient.float()
        before = kept.clone()
        received = arrives(messages, gradient, kept)
        arrived += received
        assert torch.equal(arrived + kept, total)
        # The largest travel, of each expert as many.
        whole = (before + gradient.float()).view(num_local, -1)
        sent = received.view(num_local, -1) != 0
        for one, is_sent in zip(whole.abs(), sent, strict=True):
            assert is_sent.sum() <= messages.kept
            assert one[is_sent].amin() >= one[~is_sent].amax() if 0 < is_sent.sum() < numel else True


def test_sent_entries_wait_until_they_are_among_the_largest():
    """It is worked out by hand: one of three entries a message; 2 + 2 overtakes 3, which was sent."""
    messages = CompressedGradients(1, 2.0).messages(4, torch.float32)
    assert messages.kept == 1
    kept, gradient = torch.zeros(4), torch.tensor([3.0, 2.0, -1.5, 0.0])
    received = [arrives(messages, gradient, kept).tolist() for _ in range(3)]
    assert received == [[3, 0, 0, 0], [0, 4, 0, 0], [6, 0, 0, 0]]
    assert kept.tolist() == [0, 2, -4.5, 0]


def test_a_gradient_that_is_not_finite_is_told_and_forgotten():
    for bad in (float("nan"), float("inf"), -float("inf")):
        for number in (1, 40):  # fewer, and more, than a message has entries
            messages = CompressedGradients(2, 8.0).messages(128, torch.bfloat16)
            assert messages.kept == 3
            kept, gradient = torch.ones(128), torch.ones(128, dtype=torch.bfloat16)
            gradient[:number] = bad
            assert not arrives(messages, gradient, kept).isfinite().all()
            assert kept[:64].eq(0).all() and kept[64:].sum() == 128 - 2 * 3  # the other expert's are as they were
            assert arrives(messages, torch.ones_like(gradient), kept).isfinite().all()


def test_a_sum_that_is_not_finite_is_not_mended_by_what_is_added():
    """The codec replaces what is held and not finite; a gradient must tell of it instead."""
    messages = CompressedGradients(1, 1.0).messages(8, torch.float32)
    message = torch.empty(messages.num_bytes, dtype=torch.uint8)
    encode(messages, torch.ones(8), torch.zeros(8), message)
    for rank in (0, 1):
        own = torch.full((8,), torch.inf)
        parts = [message, message]
        parts.insert(rank, own)
        assert total_of(messages, parts, rank).isinf().all() and own.isinf().all()
    own = torch.ones(8)
    total_of(messages, [own, message], 0)
    assert own.eq(1).all()  # what is summed stays as it was


def test_messages_have_the_bytes_that_the_ratio_says():
    for dtype in DTYPES:
        for ratio in (2.0, 25.0, 33.3):
            dense = 2 * 200_000 * dtype.itemsize
            sent = CompressedGradients(2, ratio).sent_bytes(2 * 200_000, dtype)
            assert ratio * 0.999 < dense / sent < ratio * 1.005
