"""Experts that are tracked by their receivers: both ends hold the same bits, and nothing is lost."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.runtime.expert_codec import TrackedExperts, kept_entries

DTYPES = (torch.float32, torch.bfloat16)


class MovingExpert:
    """In the place of a SharedExpert: moves at random, or not at all."""

    interval = 1

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.is_first = generator, True

    def move(self, experts: torch.Tensor) -> torch.Tensor | None:
        """As SharedExpert.move."""
        moves = self.is_first or torch.rand((), generator=self.generator) < 0.5
        self.is_first = False
        return torch.randn(experts.size(1), generator=self.generator) if moves else None

    def restart(self) -> None:
        """As SharedExpert.restart."""
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
        message, decode = codec.encode(flat, previous)

        def held() -> torch.Tensor:
            """Of two owners with the same experts, the own one the second."""
            return decode(torch.stack([message, message]), 1)

        return held

    def decoded(held):
        experts = held()
        assert torch.equal(experts[0], codec._held)
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
