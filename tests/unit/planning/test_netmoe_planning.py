"""planning/predicting/placement_volume.py and next_layer.py: the paper's examples, and brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.predicting import next_layer
from megatron_moe_opt.planning.predicting.next_layer import WINDOW, WINDOW_PASSES, NextLayerPrediction, known_of_samples
from megatron_moe_opt.planning.predicting.placement_volume import (
    Volume,
    moved_shares,
    placement_volume,
    settle,
    tokens_by_device,
)

# Fig. 2: four samples of four tokens, four experts on four devices of two nodes, top-1. Sample 0 prefers expert 2,
# sample 3 expert 0.
NUM = np.array([[1, 0, 2, 1], [1, 1, 1, 1], [0, 1, 1, 2], [3, 1, 0, 0]])
DEVICE, NODE = np.arange(4), np.array([0, 0, 1, 1])


def sent_between_nodes(num: np.ndarray, device: np.ndarray, node: int) -> int:
    """Tokens that one node's samples have on the other node, counted one by one."""
    return sum(
        int(num[i, e]) for i in range(4) for e in range(4) if NODE[device[i]] == node != NODE[DEVICE[e]]
    )  # fmt: skip


def test_figure_2_inter_node_volume_falls_from_5_tokens_a_node_to_2():
    home, exchanged = np.arange(4), np.array([3, 1, 2, 0])
    for before, tokens in ((home, 5), (exchanged, 2)):
        assert [sent_between_nodes(NUM, before, node) for node in (0, 1)] == [tokens, tokens]
        assert placement_volume(NUM, before, NODE).inter == 2 * tokens
    solved = place_samples(NUM, DEVICE, NODE)
    assert sorted(NODE[solved][[0, 2]]) == [1, 1] and sorted(NODE[solved][[1, 3]]) == [0, 0]
    assert placement_volume(NUM, solved, NODE).inter == 4
    assert moved_shares(home, exchanged, NODE) == (0.5, 0.5)


def test_figure_4_the_second_stage_saves_each_device_one_token_inside_its_node():
    first_stage, second_stage = np.array([3, 1, 2, 0]), np.array([2, 1, 3, 0])
    # Expert 2 sends to device 3, and expert 3 to device 2, what the sample there asked for.
    assert [NUM[0, 2], NUM[2, 3]] == [2, 2] and [NUM[2, 2], NUM[0, 3]] == [1, 1]
    before, after = (placement_volume(NUM, device, NODE) for device in (first_stage, second_stage))
    assert (before.inter, after.inter) == (4, 4) and before.intra - after.intra == 2
    assert placement_volume(NUM, place_samples(NUM, DEVICE, NODE), NODE) == after


@st.composite
def problems(draw):
    nodes, per_node, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    devices = nodes * per_node
    experts = draw(st.integers(1, 5))
    numbers = st.integers(0, 6)
    num = np.array(
        draw(st.lists(st.lists(numbers, min_size=experts, max_size=experts), min_size=devices * batch,
                      max_size=devices * batch))
    ).reshape(devices * batch, experts)  # fmt: skip
    expert_device = np.array(draw(st.lists(st.integers(0, devices - 1), min_size=experts, max_size=experts)))
    return num, expert_device, np.arange(devices) // per_node


@settings(max_examples=50)
@given(problems(), st.randoms(use_true_random=False))
def test_volume_counts_every_token_once(problem, random):
    num, expert_device, device_node = problem
    sample_device = np.repeat(np.arange(len(device_node)), len(num) // len(device_node))
    random.shuffle(sample_device)
    tokens = {"inter": 0, "intra": 0, "local": 0}
    for (i, e), count in np.ndenumerate(num):
        a, b = sample_device[i], expert_device[e]
        link = "local" if a == b else "intra" if device_node[a] == device_node[b] else "inter"
        tokens[link] += int(count)
    on_device = tokens_by_device(num, expert_device, len(device_node))
    assert placement_volume(on_device, sample_device, device_node) == Volume(**tokens)


@settings(max_examples=30)
@given(problems())
def test_placement_is_the_best_between_nodes_and_then_inside_them(problem):
    num, expert_device, device_node = problem
    devices = len(device_node)
    on_device = tokens_by_device(num, expert_device, devices)
    places = np.repeat(np.arange(devices), len(num) // devices)
    solved = placement_volume(
        on_device, place_samples(on_device, np.arange(devices), device_node), device_node
    )  # by device, as the layer asks
    by_expert = placement_volume(on_device, place_samples(num, expert_device, device_node), device_node)
    volumes = [placement_volume(on_device, np.array(device), device_node) for device in set(permutations(places))]
    assert solved.inter == by_expert.inter == min(volume.inter for volume in volumes)


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_settle_moves_only_who_must(devices, batch, random):
    position_device = np.repeat(np.arange(devices), batch)
    device = position_device.copy()
    random.shuffle(device)
    move = settle(device, position_device)
    assert sorted(move) == list(range(len(move)))
    assert (position_device[move] == device).all()
    stays = device == position_device
    assert (move[stays] == np.flatnonzero(stays)).all()


counts = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=4, max_size=4).map(np.array)


@settings(max_examples=50)
@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=4), counts)
def test_predictions_are_those_of_kernel_ridge_regression(passes, asked):
    prediction = NextLayerPrediction(3, 3)
    for num, then in passes:
        prediction.observe(num, then)
    known, then = (np.concatenate(part).astype(float) for part in zip(*passes, strict=True))
    center, mean = np.rint(known.mean(0)), np.rint(then.mean(0))
    squares = max(((known - center) ** 2).sum(), 1)

    def between(a, b):
        return ((np.sqrt(a)[:, None] - np.sqrt(b)) ** 2).sum(2)

    spread = max(between(known, known).mean(), 2**-8)

    def kernel(a):
        linear = (a - center) @ (known - center).T / squares * len(known)
        return linear + 2 / (1 + between(a, known) / spread / 4) ** 4

    noise = 3 * min(max(known.sum() / squares, 2**-10), 1)
    shares = np.linalg.solve(kernel(known) + noise * np.eye(len(known)), then - mean)
    expected = (mean + kernel(asked) @ shares).clip(0)
    # Roots are known to 1/32, and what samples count for to 2^-11.
    assert np.abs(prediction.predict(asked) - expected).max() <= 0.5 + 0.03 * max(np.abs(shares).sum(), 1)


@settings(max_examples=50)
@given(st.integers(0, 2**31))
def test_order_of_experts_changes_no_bit(seed):
    """Sums of products are exact, in any order: ranks with other processors predict the same."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(40)
    first, second = NextLayerPrediction(40, 4), NextLayerPrediction(40, 4)
    for _ in range(2):
        num, then = generator.poisson(generator.gamma(0.5, 60, (8, 40))), generator.poisson(50, (8, 4))
        assert np.array_equal(first.predict(num), second.predict(num[:, order]))
        first.observe(num, then)
        second.observe(num[:, order], then)
    assert np.array_equal(first._fit.slopes[order], second._fit.slopes)
    assert np.array_equal(first._fit.shares, second._fit.shares)


@given(st.integers(0, 2**24))
def test_shares_are_so_coarse_that_sums_are_exact(most):
    """A sample of a very long sequence may have that many tokens for one expert more than the mean."""
    bits = next_layer._share_bits(np.array([[0.0, float(most)], [-1.0, 2.0]]))
    assert (bits == next_layer.SHARE_BITS) == (most < 2**16)
    assert next_layer.WINDOW * max(most, 2) * next_layer.MAX_SHARE * 2.0**bits < 2**53


def test_what_no_linear_map_can_say_is_predicted():
    """Tokens of expert 2 go to device 0 next in texts of kind 0, those of 3 to device 1; in kind 1 the other way."""
    generator = np.random.default_rng(0)

    def some_pass() -> tuple[np.ndarray, np.ndarray]:
        kind, choice = generator.integers(0, 2, (2, 32))
        num = generator.poisson(np.stack([60 * (1 - kind), 60 * kind, 40 * (1 - choice), 40 * choice], axis=1) + 2)
        device = kind ^ choice
        return num, generator.poisson(np.stack([100 * (1 - device), 100 * device], axis=1) + 2)

    prediction, seen = NextLayerPrediction(4, 2), []
    for _ in range(10):
        seen.append(some_pass())
        prediction.observe(*seen[-1])
    num, then = some_pass()
    known, known_then = (np.concatenate(part) for part in zip(*seen, strict=True))
    linear = num @ np.linalg.lstsq(known, known_then, rcond=None)[0]
    error, of_linear = (np.abs(guess - then).mean() for guess in (prediction.predict(num), linear))
    assert of_linear > 40 and error < 15


def test_what_is_no_longer_so_is_forgotten():
    """The window is full of passes before experts changed their parts; as many later, none of those is in it."""
    prediction, num = NextLayerPrediction(4, 4), 100 * np.eye(4, dtype=np.int64).repeat(16, axis=0)
    for then in (num, num[:, ::-1]):
        for _ in range(WINDOW_PASSES + 1):
            prediction.observe(num, then)
            assert len(prediction._known) <= WINDOW
        assert np.abs(prediction.predict(num) - then).max() <= 5


def test_counts_of_long_samples_stay_exact():
    """A million tokens a sample: the prediction keeps to what was seen."""
    generator = np.random.default_rng(0)
    num = generator.multinomial(2**20, generator.dirichlet(np.full(16, 0.2), size=32))
    prediction = NextLayerPrediction(16, 16)
    for _ in range(3):
        prediction.observe(num, num[:, ::-1])
    assert np.abs(prediction.predict(num) - num[:, ::-1]).max() < 0.02 * 2**20


def test_what_sets_samples_apart_is_predicted():
    """Each sample prefers some experts a little, and others in the next layer, that its preference decides."""
    generator, experts = np.random.default_rng(0), 8
    shift = np.roll(np.arange(experts), 3)

    def some_pass() -> tuple[np.ndarray, np.ndarray]:
        preference = generator.dirichlet(np.full(experts, 5.0), size=32)
        return tuple(np.stack([generator.multinomial(2000, p) for p in q]) for q in (preference, preference[:, shift]))

    prediction = NextLayerPrediction(experts, experts)
    for _ in range(10):
        prediction.observe(*some_pass())
    num, then = some_pass()
    assert np.abs(prediction.predict(num) - then).mean() < 0.3 * np.abs(then.mean(0) - then).mean()


def test_counts_of_the_layer_before_are_known():
    num, before = np.ones((2, 64), np.int64), np.zeros((2, 64), np.int64)
    assert np.array_equal(known_of_samples(num, before), np.hstack([num, before]))
    assert known_of_samples(num, None) is num


def test_prediction_before_anything_was_seen_is_zero():
    assert not NextLayerPrediction(3, 2).predict(np.ones((5, 3), np.int64)).any()


def test_identity_routing_is_learnt():
    """Samples of one expert each that keep it: the next layer's counts are this layer's."""
    prediction, num = NextLayerPrediction(4, 4), 800 * np.eye(4, dtype=np.int64)
    prediction.observe(num, num)
    assert np.abs(prediction.predict(num) - num).max() <= 5


@pytest.mark.parametrize("shape", [(0, 3), (5, 3)])
def test_prediction_from_nothing(shape):
    prediction = NextLayerPrediction(3, 3)
    prediction.observe(np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    assert not prediction.predict(np.ones((2, 3), np.int64)).any()
