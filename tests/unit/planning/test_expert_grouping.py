"""Orders of experts: planted groups are found, plans are balanced and repeatable, files are checked."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import place_samples, solve_placement
from megatron_moe_opt.planning.offline.expert_grouping import group_experts
from megatron_moe_opt.planning.offline.expert_order import (
    ExpertOrder,
    order_of_layer,
    read_expert_order,
    stock_devices,
    write_expert_order,
)
from megatron_moe_opt.planning.traces.routing_generator import generate_routing
from megatron_moe_opt.planning.traces.routing_replay import replay
from tests.unit.trace_cases import planted_trace, random_trace

TASTE = {"node_taste": 1.5, "taste": 2.0}


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found(seed):
    trace, group_of = planted_trace(seed)
    device = group_experts(trace.counts(), 2, 2, solve_placement)
    assert {len({(g, d) for g, d in zip(group_of[layer], device[layer], strict=True)}) for layer in range(3)} == {4}
    # The layers agree on the device of a group of samples.
    done = replay(trace.counts(), device, np.array([0, 0, 1, 1]), place_samples)
    assert done.volumes["oracle"][..., :2].sum() == 0


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1), (2, 1), (2, 4)])
def test_plans_are_balanced_repeatable_and_no_worse_than_stock(nodes, ranks):
    trace = generate_routing(passes=3, layers=4, samples=16, tokens=32, experts=16, nodes=2, **TASTE, seed=5)
    counts, devices = trace.counts(), nodes * ranks
    device = group_experts(counts, nodes, ranks, solve_placement)
    assert all(np.bincount(layer, minlength=devices).tolist() == [16 // devices] * devices for layer in device)
    assert np.array_equal(device, group_experts(counts.copy(), nodes, ranks, solve_placement))
    node = np.repeat(np.arange(nodes), ranks)
    stock, ours = (replay(counts, one, node, place_samples) for one in (stock_devices(4, 16, devices), device))
    assert ours.volume("oracle").inter < stock.volume("oracle").inter


def test_routing_without_locality_is_planned_too():
    device = group_experts(random_trace().counts(), 2, 2, solve_placement)
    assert sorted(device[0].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_orders_are_read_back(tmp_path):
    device = np.array([[0, 1, 1, 0], [1, 0, 1, 0]])
    order = ExpertOrder.of_devices(device, np.array([2, 4]), nodes=1, ranks=2)
    assert order.layers == {2: (0, 3, 1, 2), 4: (1, 3, 0, 2)}
    assert np.array_equal(order.expert_device(np.array([2, 4])), device)
    path = tmp_path / "order.json"
    write_expert_order(path, order)
    assert read_expert_order(path) == order
    assert order_of_layer(order, path, 4) == (1, 3, 0, 2)
    with pytest.raises(ConfigurationError, match="has no order for MoE layer 3, only for 2, 4"):
        order_of_layer(order, path, 3)


GOOD = {"format": "moe-opt expert order", "version": 1, "num_experts": 4, "nodes": 1, "ranks": 2}
GOOD |= {"layers": {"1": [[0, 1], [2, 3]]}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "cluster"}, "line 1: not a file of moe-opt trace place: order the experts with moe-opt trace"),
        ({"version": 2}, "line 1: version 2 cannot be read "),
        ({"more": 1}, "more: unknown field"),
        ({"num_experts": 6}, r"is not a list of 3"),
        ({"ranks": 3}, "4 experts, 3 ranks and 1 nodes do not divide"),
        ({"nodes": 4}, "do not divide"),
        ({"layers": {}}, "no layer"),
        ({"layers": {"01": [[0, 1], [2, 3]]}}, "is not the number of a layer"),
        ({"layers": {"1": [[0, 1], [2, 2]]}}, "not each of the experts 0 to 3 once"),
        ({"layers": {"1": [[0, 1], [2]]}}, "is not a list of 2"),
        ({"layers": {"1": [[0, 1], [2, -3]]}}, "-3 is not an integer of at least 0"),
    ],
)
def test_wrong_orders_are_refused(tmp_path, change, problem):
    path = tmp_path / "order.json"
    path.write_text(json.dumps(GOOD))
    assert read_expert_order(path).layers == {1: (0, 1, 2, 3)}
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigurationError, match=problem):
        read_expert_order(path)
