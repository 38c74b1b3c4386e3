"""States of Megatron's random generators are kept as PyTorch's are."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_moe_opt.integration.random_states import AllRandomStates


@pytest.mark.parametrize("of_graphs", [False, True])
def test_what_megatron_tracks_is_restored(of_graphs):
    tracker, outer = get_cuda_rng_tracker(), AllRandomStates()
    generator = torch.Generator().manual_seed(3)
    tracked = generator if of_graphs else generator.get_state()
    tracker.set_states({"experts": tracked})
    try:
        states, before = AllRandomStates(), generator.get_state()
        assert not states.moved()
        torch.rand(3, generator=generator)
        if not of_graphs:  # as the tracker's forks leave it
            tracker.states_["experts"] = generator.get_state()
        assert states.moved()
        for _ in range(2):
            states.restore()
            assert not states.moved()
            now = tracker.get_states()["experts"]
            assert torch.equal(now.get_state() if of_graphs else now, before)
            tracker.states_["experts"] = torch.Generator().get_state()
    finally:
        outer.restore()
