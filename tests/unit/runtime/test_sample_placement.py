"""Decisions of the layers of one block, pass by pass, without process groups."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement, SampleOrder
from megatron_moe_opt.dispatchers.sample_traffic import SampleRowBytes, SampleTraffic
from megatron_moe_opt.planning.predicting.next_layer import NextLayerPrediction
from megatron_moe_opt.planning.predicting.sample_costs import RowCosts
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts
from megatron_moe_opt.topology.sample_holders import SampleHolders

RANKS, BATCH, EXPERTS = 4, 2, 4
HOLDERS = SampleHolders.from_ranks(list(range(RANKS)), tuple([rank] for rank in range(RANKS)), ("a", "a", "b", "b"), 1)
COSTS = RowCosts(HOLDERS, EXPERTS)


def decide(
    placement: LayerPlacement,
    num: np.ndarray,
    rows_beside: int = 0,
    learn: bool = False,
    lengths: list[int] | None = None,
):
    """Returns a decision for `num` [positions, E] of the samples where they are; `lengths`
    [positions]: their tokens, 10 each.
    """
    rows = torch.from_numpy(num).view(RANKS, 1, BATCH, EXPERTS)
    parts, unlike = torch.full((RANKS, 1, BATCH), 10), torch.zeros(RANKS, 1, dtype=torch.bool)
    if lengths is not None:
        parts = torch.tensor(lengths).view_as(parts)
    counts = SampleCounts(rows, parts, unlike, overfull=torch.zeros(RANKS, 1))
    return placement.decide(counts, rows_beside, learn).decision.result()


def two_layers() -> tuple[LayerPlacement, LayerPlacement]:
    order = SampleOrder()
    return LayerPlacement(order, HOLDERS, COSTS, last=False), LayerPlacement(order, HOLDERS, COSTS, last=True)


def taste(experts: list[int]) -> np.ndarray:
    """Returns samples of 10 tokens that go to one expert each."""
    return 10 * np.eye(EXPERTS, dtype=np.int64)[experts]


def test_samples_go_to_their_experts_and_home_again():
    first, last = two_layers()
    experts = [3, 0, 1, 2, 0, 3, 2, 1]
    there = decide(first, taste(experts))
    assert there.before.tolist() == list(range(8))
    assert (there.move // BATCH).tolist() == experts  # expert e is on rank e
    here = taste(experts)[there.after]  # in the order of positions
    home = decide(last, here)
    assert home.before.tolist() == there.after.tolist()
    assert home.after.tolist() == list(range(8))


@pytest.mark.parametrize("lengths", [[10] * 7 + [0], [10] * 6 + [9, 9]])
def test_all_stay_where_ranks_have_other_numbers_of_samples_or_of_tokens(lengths):
    first, last = two_layers()
    num = taste([3, 0, 1, 2, 0, 3, 2, 1]) * (np.array(lengths) > 0)[:, None]
    for layer in (first, last):
        assert decide(layer, num, lengths=lengths).move.tolist() == list(range(8))
        assert layer.order.running.at is None


def test_who_is_right_stays():
    first, _ = two_layers()
    move = decide(first, taste([0, 0, 1, 1, 3, 2, 2, 3])).move
    assert move.tolist() == [0, 1, 2, 3, 6, 5, 4, 7]


def test_a_move_that_costs_more_than_it_saves_is_not_made():
    first, _ = two_layers()
    num = taste([1, 0, 0, 1, 2, 2, 3, 3])
    assert decide(first, num).move.tolist() != list(range(8))
    first.order.begin()
    assert decide(first, num, rows_beside=11).move.tolist() == list(range(8))


def test_the_next_layer_is_learnt_and_asked():
    """This layer uses experts 0 and 2, each sample only one of them; the next one needs the other node."""
    first, last = two_layers()
    experts = [0, 0, 0, 0, 2, 2, 2, 2]
    then = [2, 3, 2, 3, 0, 1, 0, 1]
    for _ in range(3):
        first.order.begin()
        decision = decide(first, taste(experts), learn=True)
        decide(last, 3 * taste(then)[decision.after], learn=True)
    first.order.begin()
    decision = decide(first, taste(experts))
    # 30 tokens of the next layer weigh more than 10 of this one.
    assert (HOLDERS.rank_node[decision.move // BATCH] == [1, 1, 1, 1, 0, 0, 0, 0]).all()


def test_a_layer_is_not_asked_before_it_has_learnt(monkeypatch):
    """However long a fit takes, the next pass's decision rests on it: on every rank alike."""
    observe = NextLayerPrediction.observe

    def slowly(self, num, then):
        time.sleep(0.2)
        observe(self, num, then)

    monkeypatch.setattr(NextLayerPrediction, "observe", slowly)
    first, last = two_layers()
    decision = decide(first, taste([0, 0, 0, 0, 2, 2, 2, 2]), learn=True)
    decide(last, 3 * taste([2, 3, 2, 3, 0, 1, 0, 1])[decision.after], learn=True)
    first.order.begin()
    decision = decide(first, taste([0, 0, 0, 0, 2, 2, 2, 2]))
    assert (HOLDERS.rank_node[decision.move // BATCH] == [1, 1, 1, 1, 0, 0, 0, 0]).all()


def test_the_layer_before_is_asked_too():
    """The middle layer treats all samples alike: only the first one's routing tells what the last one needs."""
    order = SampleOrder()
    first, middle, last = (LayerPlacement(order, HOLDERS, COSTS, last=index == 2) for index in range(3))
    kinds = np.array([0, 2, 0, 2, 0, 2, 0, 2])
    then = np.array([3, 1])[kinds // 2]
    for learn in (True, True, True, False):
        order.begin()
        at = decide(first, taste(list(kinds)), learn=learn).after
        decision = decide(middle, np.full((8, EXPERTS), 2, np.int64), learn=learn)
        decide(last, taste(list(then))[decision.after], learn=learn)
        assert (decision.before == at).all()
    node_of_sample = HOLDERS.rank_node[np.argsort(decision.after) // BATCH]
    assert (node_of_sample == HOLDERS.rank_node[then]).all()


def test_traffic_of_a_decision():
    first, _ = two_layers()
    decision = decide(first, taste([2, 0, 1, 1, 2, 0, 3, 3]))  # samples 0 and 5 are on the wrong nodes
    traffic = SampleTraffic()
    row = SampleRowBytes(stock_dispatch=100, stock_combine=50, dispatch=200, combine=200)
    traffic.add(decision, HOLDERS, COSTS, 5, row, exposed=0.5)
    means = traffic.take()
    assert means["stock inter-node MB"] * 1e6 == pytest.approx(20 * 150)
    # The dispatch as stock's, a combine without, and 5 rows of each of the two samples.
    assert means["inter-node MB"] * 1e6 == pytest.approx((20 + 2 * 5) * 200)
    assert means["stock intra-node MB"] == 0
    assert means["moved across nodes %"] == 25 and means["moved across devices %"] == 25
    assert means["exposed ms"] == 500 and means["solve ms"] > 0
    assert traffic.take() == {}
