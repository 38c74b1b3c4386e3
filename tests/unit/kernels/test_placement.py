"""The placement solver against scipy's linear_sum_assignment on the expanded matrix, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_moe_opt.kernels import place_samples, solve_placement
from megatron_moe_opt.planning.offline import placement as by_scipy
from tests import kernel_reference as reference
from tools.bench.placement import transfer_costs


def least_cost(cost, capacity):
    """The optimum by scipy."""
    return cost_of(cost, capacity, by_scipy.solve_placement(cost, capacity))


def cost_of(cost, capacity, placed):
    """The cost of a placement, after a look at its capacities."""
    assert placed.dtype == np.int64
    assert (np.bincount(placed, minlength=len(capacity)) <= capacity).all()
    return cost[np.arange(len(cost)), placed].sum()


def random_costs(rng, kind, shape):
    """int64 costs whose optima are unique, tied, or degenerate."""
    samples, sinks = shape
    if kind == "tied":
        return rng.integers(0, 4, shape)
    if kind == "equal rows":
        return np.repeat(rng.integers(-50, 50, (1, sinks)), samples, axis=0)
    if kind == "products":  # all samples want the same sinks, some more than others
        return rng.integers(0, 100, (samples, 1)) * rng.integers(0, 100, (1, sinks))
    if kind == "one hot sink":
        cost = rng.integers(0, 1000, shape)
        cost[:, rng.integers(sinks)] = -1
        return cost
    if kind == "huge":  # too large for 32 bits
        return rng.integers(-(2**46), 2**46, shape)
    if kind == "zeros":
        return np.zeros(shape, dtype=np.int64)
    return rng.integers(-2000, 2000, shape)


KINDS = ["any", "tied", "equal rows", "products", "one hot sink", "huge", "zeros"]


@st.composite
def problems(draw, max_samples=150, max_sinks=9):
    """cost [I, N] and capacity [N], with or without places to spare."""
    samples, sinks = draw(st.integers(0, max_samples)), draw(st.integers(1, max_sinks))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    cost = random_costs(rng, draw(st.sampled_from(KINDS)), (samples, sinks))
    capacity = rng.multinomial(samples, rng.dirichlet(np.full(sinks, draw(st.sampled_from([0.1, 1.0, 100.0])))))
    if draw(st.booleans()):
        capacity = capacity + rng.integers(0, draw(st.sampled_from([2, 40])), sinks)
    return cost, capacity


@settings(max_examples=400)
@given(problems())
@example((np.zeros((0, 3), dtype=np.int64), np.zeros(3, dtype=np.int64)))
@example((np.array([[5], [-7]]), np.array([2])))
def test_integers_cost_the_least(case):
    cost, capacity = case
    placed = solve_placement(cost, capacity)
    assert cost_of(cost, capacity, placed) == least_cost(cost, capacity)
    assert np.array_equal(placed, solve_placement(cost.copy(), capacity.copy()))


@settings(max_examples=150)
@given(problems(max_samples=60), st.sampled_from([1.0, 1e-300, 1e280, 2.0**-1070]))
def test_floats_cost_the_least(case, scale):
    cost, capacity = case
    assert cost_of(cost, capacity, solve_placement(cost.astype(float), capacity)) == least_cost(cost, capacity)
    values = (cost + np.random.default_rng(cost.size).random(cost.shape)) * scale
    excess = cost_of(values, capacity, solve_placement(values, capacity)) - least_cost(values, capacity)
    assert excess <= len(cost) * np.ptp(values, axis=1).max(initial=0.0) * 2.0**-50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("samples", "sinks"), [(500, 2), (600, 4), (640, 12)])
def test_large_problems_cost_the_least(kind, samples, sinks):
    """Large enough to start from coarser problems, three deep."""
    rng = np.random.default_rng(samples)
    cost = random_costs(rng, kind, (samples, sinks))
    capacity = rng.multinomial(samples, rng.dirichlet(np.full(sinks, 2.0)))
    assert cost_of(cost, capacity, solve_placement(cost, capacity)) == least_cost(cost, capacity)


@settings(max_examples=30)
@given(problems(max_samples=20, max_sinks=4))
def test_the_plain_reference_costs_the_least(case):
    cost, capacity = case
    placed = reference.kuhn_munkres(torch.from_numpy(cost), torch.from_numpy(capacity))
    assert cost_of(cost, capacity, placed.numpy()) == least_cost(cost, capacity)


def test_extreme_costs():
    low, high = -(2**62), 2**62 - 1
    cost = np.array([[low, low + 2**56 - 1], [high, high - 2**56 + 1], [high, high], [low, low]])
    placed = solve_placement(cost, 2)
    assert placed.tolist()[:2] == [0, 1]
    for wrong in ([[0, 2**56 + 1]], [[-(2**63), 2**63 - 1]], [[2**63 - 1, -(2**63)]], [[2**63 - 1, 2**63 - 1]]):
        with pytest.raises(ValueError, match=r"within 2\^62 of zero, and those of one sample within 2\^56"):
            solve_placement(np.array(wrong), 1)


def test_kinds_of_arguments():
    cost, capacity = np.array([[3, 1, 2], [1, 9, 9], [1, 2, 3]]), np.array([1, 1, 1])
    expected = [1, 0, 2]
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.float32, np.float64):
        assert solve_placement(cost.astype(dtype), capacity.astype(np.int32)).tolist() == expected
    for dtype in (torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        placed = solve_placement(torch.tensor(cost).to(dtype), torch.tensor(capacity))
        assert isinstance(placed, torch.Tensor) and placed.tolist() == expected
    strided = np.asfortranarray(np.repeat(cost, 2, axis=0))[::2]
    strided.flags.writeable = False
    assert solve_placement(strided, 1).tolist() == expected
    assert solve_placement(cost[::-1], np.int64(1)).tolist() == expected[::-1]
    assert solve_placement(cost.tolist(), [1, 1, 1]).tolist() == expected


@pytest.mark.parametrize(
    ("cost", "capacity", "message"),
    [
        (np.zeros((3, 2)), [1, 1], "capacities sum to 2, too few for 3 samples"),
        (np.zeros((3, 2)), [5, -1], r"capacity\[1\] is negative: -1"),
        (np.zeros((3, 2)), [3], r"capacity has 1 entries, but cost of shape \[3, 2\] has 2 sinks"),
        (np.zeros((3, 0)), np.zeros(0, dtype=int), "capacities sum to 0, too few for 3 samples"),
        (np.zeros(3), 3, r"cost must have 2 dimension\(s\), but its shape is \[3\]"),
        (np.zeros((3, 2)), [1.5, 1.5], "capacity is torch.float64: pass integers"),
        (np.zeros((3, 2), dtype=bool), 2, "cost is torch.bool: pass signed integers or floats"),
        (np.zeros((3, 2), dtype=np.uint64), 2, "cost is torch.uint64: pass signed integers or floats"),
        (np.array([[0.0, 1.0], [2.0, np.nan]]), 1, r"cost\[1, 1\] is not finite"),
        (np.array([[0.0, -np.inf]]), 1, r"cost\[0, 1\] is not finite"),
        (np.array([[-1.7e308, 1.7e308]]), 1, "differ by more than a float64 holds"),
        (torch.zeros(3, 2, device="meta"), 2, "cost is on meta, where nothing has values"),
    ],
)
def test_refusals(cost, capacity, message):
    with pytest.raises(ValueError, match=message):
        solve_placement(cost, capacity)


# ---- Two stages ----


@st.composite
def clusters(draw):
    """num [I, E], expert_device [E], device_node [J], capacity [J]; nodes of unequal size, devices without experts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    samples, experts = draw(st.integers(0, 60)), draw(st.integers(1, 12))
    devices = draw(st.integers(1, 8))
    device_node = rng.integers(0, min(3, devices), devices)
    num = rng.multinomial(64, rng.dirichlet(np.full(experts, 0.3)), samples)
    capacity = rng.multinomial(samples, rng.dirichlet(np.full(devices, 2.0))) + draw(st.integers(0, 1))
    return num, rng.integers(0, devices, experts), device_node, capacity


def check_both_stages(num, expert_device, device_node, capacity, device_of):
    """Each stage costs what scipy's optimum costs: nodes over all samples, devices over the samples of each node."""
    inter, intra = (c.numpy() for c in transfer_costs(*map(torch.from_numpy, (num, expert_device, device_node))))
    node_capacity = np.bincount(device_node, capacity).astype(int)
    assert cost_of(inter, node_capacity, device_node[device_of]) == least_cost(inter, node_capacity)
    for node in range(len(node_capacity)):
        samples, devices = device_node[device_of] == node, np.flatnonzero(device_node == node)
        inside = intra[samples][:, devices]
        place = np.searchsorted(devices, device_of[samples])
        assert cost_of(inside, capacity[devices], place) == least_cost(inside, capacity[devices])


@settings(max_examples=150)
@given(clusters())
def test_two_stages_cost_the_least(case):
    num, expert_device, device_node, capacity = case
    device_of = place_samples(num, expert_device, device_node, capacity)
    check_both_stages(num, expert_device, device_node, capacity, device_of)
    halves = place_samples(num * 0.5, expert_device, device_node, capacity)
    check_both_stages(num, expert_device, device_node, capacity, halves)
    check_both_stages(*case, by_scipy.place_samples(*case))


def test_the_same_placement_on_any_number_of_threads():
    rng = np.random.default_rng(0)
    num = rng.multinomial(4096, rng.dirichlet(np.full(64, 0.3), 6000))
    expert_device, device_node = np.arange(64) // 4, np.arange(16) // 4
    threads = torch.get_num_threads()
    try:
        placed = []
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            placed.append(place_samples(num, expert_device, device_node))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(placed[0], placed[1]) and np.array_equal(placed[0], placed[2])
    assert np.bincount(placed[0]).tolist() == [375] * 16


def test_background_threads_solve_side_by_side():
    rng = np.random.default_rng(3)
    costs = [random_costs(rng, kind, (600, 8)) for kind in KINDS]
    with ThreadPoolExecutor(4) as pool:
        placed = list(pool.map(lambda cost: solve_placement(cost, 75), costs))
    assert all(np.array_equal(p, solve_placement(cost, 75)) for p, cost in zip(placed, costs, strict=True))


def test_the_paper_s_example():
    """Figs. 2 and 4: four samples of four tokens on two nodes of two devices, one expert on each. The text does not
    give the routing; this one has the volumes of Fig. 2: five tokens leave each node, then two, once samples 0 and 3
    have changed nodes. Inside node 1, samples 0 and 2 then swap devices."""
    num = torch.tensor([[0, 0, 3, 1], [1, 2, 0, 1], [1, 1, 1, 1], [3, 0, 1, 0]])
    expert_device, device_node = torch.arange(4), torch.tensor([0, 0, 1, 1])
    inter, intra = transfer_costs(num, expert_device, device_node)

    def volumes(device_of):
        nodes = device_node[device_of]
        leave = inter[range(4), nodes]
        inside = intra[range(4), device_of]
        return [[int(volume[nodes == node].sum()) for node in (0, 1)] for volume in (leave, inside)]

    first_stage = torch.tensor([3, 1, 2, 0])  # Fig. 2(c)
    device_of = place_samples(num, expert_device, device_node)
    assert device_of.tolist() == [2, 1, 3, 0]
    assert volumes(torch.arange(4))[0] == [5, 5]
    assert volumes(first_stage) == [[2, 2], [1, 4]]
    assert volumes(device_of) == [[2, 2], [1, 2]]


def test_costs_of_a_small_cluster_by_hand():
    # Devices 0 and 1 on node 0, device 2 on node 1; experts 0 and 3 on device 2, 1 on device 0, 2 on device 1.
    num, expert_device, device_node = torch.tensor([[1, 2, 4, 8]]), torch.tensor([2, 0, 1, 2]), torch.tensor([0, 0, 1])
    inter, intra = transfer_costs(num, expert_device, device_node)
    assert inter.tolist() == [[9, 6]]
    assert intra.tolist() == [[4, 2, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], [0, 1], [0, 0]), "1 samples do not divide among 2 devices: pass their capacity"),
        (([[1, 2]], [0], [0]), r"expert_device has 1 entries, but num of shape \[1, 2\] has 2 experts"),
        (([[1, 2]], [0, 1], [0]), r"expert_device\[1\] is 1, outside \[0, 1\), the number of devices"),
        (([[1, 2]], [0, 0], [-1]), r"device_node\[0\] is -1, outside \[0, 0\), the number of nodes"),
        (([[1, 2]], [0, 0], [1]), "device_node holds node 1, but there are only 1 devices: count the nodes from 0"),
        (([[1, 2]], [0, 0], [0], [1, 1]), "capacity has 2 entries, but device_node has 1"),
        (([[1, 2]], [0, 0], [0], [0]), "capacities sum to 0, too few for 1 samples"),
        (([[1, 2]], [0, 0], [0, 0], [2, -1]), r"capacity\[1\] is negative: -1"),
        (([[1, 2**40]], [0, 0], [0]), r"num holds a count of 2\^40 tokens or more"),
        (([[1.0, np.inf]], [0, 0], [0]), "num holds a count that is not finite"),
    ],
)
def test_two_stage_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_samples(*(np.array(argument) for argument in arguments))
