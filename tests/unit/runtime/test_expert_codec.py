"""Experts that are tracked by their receivers: both ends hold the same bits, and nothing is lost."""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.runtime.travelling_experts.expert_codec import Message, TrackedExperts, kept_entries

DTYPES = (torch.float32, torch.bfloat16)


def encode(message: Message) -> torch.Tensor:
    if message.write is not None:
        message.write()
    return message.sent


def held_after(*flats: torch.Tensor, ratio: float = 1.0) -> torch.Tensor:
    """What receivers hold after messages of these experts, each of two owners."""
    codec, held = TrackedExperts(1, ratio), None
    for flat in flats:
        before = held
        message = codec.prepare(flat.clone(), lambda before=before: before)
        encoded = encode(message)
        held = message.decode(torch.stack([encoded, encoded]), 1)
        assert torch.equal(held[0].isnan(), codec._held.experts.isnan())
    return held[0]


def test_weights_that_were_not_finite_once_arrive_when_they_are():
    for bad in (torch.nan, torch.inf, -torch.inf):
        expert = torch.randn(40)
        expert[7] = bad
        mended = expert.clone().index_fill(0, torch.tensor(7), 0.5)
        assert torch.equal(held_after(expert, expert, mended, ratio=4.0)[7], torch.tensor(0.5))
        lost = mended.clone().index_fill(0, torch.tensor(3), bad)
        held = held_after(mended, lost, mended, ratio=4.0)
        assert held.isfinite().all() and held[3] == mended[3]


def test_steps_that_overflow_arrive():
    first, second = torch.full((40,), -60000.0).half(), torch.full((40,), 60000.0).half()
    assert torch.equal(held_after(first, second, second, second), second)


class MovingExpert:
    """Replaces a MeanExpert: moves at random, or not at all."""

    interval = 1

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.is_first = generator, True

    def move(self, experts: torch.Tensor) -> torch.Tensor | None:
        """Moves as MeanExpert.move says."""
        moves = self.is_first or torch.rand((), generator=self.generator) < 0.5
        self.is_first = False
        return torch.randn(experts.size(1), generator=self.generator).to(experts.dtype) if moves else None

    def restart(self) -> None:
        """Restarts as MeanExpert.restart says."""
        self.is_first = True


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_local=st.integers(1, 3),
    numel=st.integers(1, 200),
    ratio=st.floats(1.5, 40),
    has_shared=st.booleans(),
    events=st.lists(st.sampled_from(["change", "stay", "never decoded", "restart"]), max_size=8),
    seed=st.integers(0, 1 << 30),
)
def test_owner_and_receivers_hold_the_same_and_all_of_it_arrives(
    dtype, num_local, numel, ratio, has_shared, events, seed
):
    generator = torch.Generator().manual_seed(seed)
    shared = MovingExpert(generator) if has_shared else None
    codec = TrackedExperts(num_local, ratio, shared)
    flat = torch.randn(num_local * numel, generator=generator).to(dtype)

    def send(previous):
        message = codec.prepare(flat.clone(), previous)
        encoded = encode(message)

        @functools.cache
        def held() -> torch.Tensor:
            """Returns what is held of two owners with the same experts, of whom the second is this rank."""
            return message.decode(torch.stack([encoded, encoded]), 1)

        return held

    def decoded(held):
        experts = held()
        assert torch.equal(experts[0], codec._held.experts)
        # The other owner's is the receiver's own, which the next message needs no more than this one did.
        return lambda: torch.stack([experts[0], torch.full_like(flat, torch.nan)])

    held = decoded(send(None))
    for event in events:
        if event == "restart":
            codec.restart()
        if event in ("change", "never decoded"):
            flat = (flat + 0.1 * torch.randn(flat.shape, generator=generator)).to(dtype)
        held = send(held) if event == "never decoded" else decoded(send(held))
    if has_shared:
        shared.move = lambda experts: None
    for _ in range(-(-numel // kept_entries(numel, dtype, ratio))):
        held = decoded(send(held))
    # Each entry had a turn; what is left is the rounding of one residual.
    assert (held()[0].float() - flat.float()).abs().max() <= 8 * torch.finfo(dtype).eps
