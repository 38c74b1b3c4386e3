"""Generated routing: equal seeds, equal load. The volumes of NetMoE's Table 5: tests/papers."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.offline.expert_order import stock_devices
from megatron_moe_opt.planning.traces.routing_generator import TABLE5, generate_routing, like_table5
from megatron_moe_opt.planning.traces.routing_replay import replay


def test_seeds_decide_and_experts_get_equal_shares():
    settings = {"passes": 8, "layers": 2, "samples": 64, "tokens": 32, "experts": 16, "nodes": 2, "topk": 3}
    settings |= {"node_taste": 1.5, "taste": 2.0}
    one, again, other = (generate_routing(**settings, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.experts, again.experts) and not np.array_equal(one.experts, other.experts)
    assert one.experts.shape == (8, 2, 64, 32, 3)
    load = one.counts().sum(axis=(0, 2))
    assert load.max() / load.mean() < 1.3


def test_every_pair_of_layers_is_as_local_as_the_first():
    """What each pair of 8 layers could save, mean over seeds."""
    row = TABLE5["MoE-GPT-S"][2]
    reductions = []
    for seed in range(3):
        trace = like_table5(row, passes=3, layers=8, seed=seed, tokens=64)
        done = replay(trace.counts(), stock_devices(8, 32, row.devices), np.arange(row.devices) // 8, place_samples)
        reductions.append([done.reduction("oracle", pair) for pair in range(7)])
    by_pair = np.mean(reductions, axis=0)
    assert by_pair[4:].mean() == pytest.approx(by_pair[:3].mean(), abs=0.02)
    assert by_pair == pytest.approx(row.reduction, abs=0.05)
