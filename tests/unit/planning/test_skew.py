"""Uneven routing: what shared links carry, and what the experts of a domain compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.predicting.skew import (
    EVERY_RANK,
    ONE_RANK,
    Skew,
    link_sharing,
    most_uneven_layer,
    rows_as_even,
)
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains

ROWS = (1.0, 1.0, 2.0, 4.0)  # the mean is 2: nodes have 0.5 and 1.5 times that, the busiest rank twice


def cluster(sharing: float | None = None, nodes: tuple[int, ...] = (0, 0, 1, 1), ep: int = 4) -> Cluster:
    curves = {(Kind.SEND_RECEIVE, EVERY_RANK): ((1000, 1e-3), (4000, 4e-3))}
    if sharing is not None:
        curves[Kind.SEND_RECEIVE, ONE_RANK] = ((1000, 1e-3 / sharing), (2000, 2e-3 / sharing))
    return Cluster(World(nodes, ep=ep), curves)


def test_a_link_is_shared_as_far_as_a_rank_alone_is_faster():
    assert link_sharing(cluster(2.0)) == pytest.approx(2.0)
    assert link_sharing(cluster(0.9)) == 1.0  # a disturbed measurement
    assert link_sharing(cluster()) == 1.0


def test_the_busiest_rank_decides_on_links_of_its_own_and_the_busiest_node_on_shared_ones():
    assert Skew(2.0, ROWS, cluster(1.0)).exchanged == pytest.approx(2.0)
    assert Skew(2.0, ROWS, cluster(2.0)).exchanged == pytest.approx(1.5)
    assert Skew(2.0, ROWS, cluster(1.25)).exchanged == pytest.approx(1.6)  # its part of a link is all it can use
    assert Skew(2.0, ROWS, cluster()).exchanged == 2.0
    assert Skew(2.0, (), cluster(2.0)).exchanged == 2.0  # where rows are is not known
    assert Skew(2.0, ROWS, cluster(2.0, nodes=(0, 0, 0, 0))).exchanged == 2.0  # no message leaves a node


def test_rows_of_ranks_are_those_of_one_layer():
    assert most_uneven_layer([[1.0, 5.0], [1.0, 0.0], [2.0, 1.0]]) == (5.0, 0.0, 1.0)
    assert most_uneven_layer([[3.0], [1.0]]) == (3.0, 1.0)
    # A stage of two layers and one of none have as many layers as there are ranks, but not the rows of each rank.
    assert most_uneven_layer([[3.0, 1.0], [1.0, 3.0], [], []]) == ()
    assert most_uneven_layer([[0.0], [0.0]]) == (0.0, 0.0)


def test_a_number_of_rows_for_who_chooses_by_one():
    rows = [100, 100, 200, 400]
    assert rows_as_even(rows, cluster(2.0)) == 400  # shared links, but a device for each rank
    assert rows_as_even(rows, replace(cluster(2.0), compute_sharing=2.0)) == 300
    assert rows_as_even([300, 100], cluster(ep=2)) == 300  # as are those of the other group
    assert rows_as_even([50] * 4, cluster(2.0)) == 50 and rows_as_even([0] * 4, cluster()) == 0


def test_regions_share_their_rows():
    skew = Skew(2.0, ROWS, cluster(2.0))
    cases = {
        ((1, 1), 0): 1.5,
        ((1, 1), 1): 2.0,
        ((1, 2), 1): 1.5,
        ((2, 1), 0): 1.0,
        ((2, 1), 1): 1.25,
        ((2, 2), 1): 1.0,
    }
    for (sizes, level), expected in cases.items():
        assert skew.of_regions(ExpertDomains((2, 2), sizes), level) == pytest.approx(expected)
    unknown = Skew(2.0, (), cluster(2.0))
    assert unknown.of_regions(ExpertDomains((2, 2), (1, 2)), 1) == 2.0
    assert unknown.of_regions(ExpertDomains((2, 2), (2, 2)), 1) == 1.0


def test_experts_take_as_long_as_the_busiest_rank_or_on_shared_processors_the_busiest_node():
    own, shared, partly = (replace(cluster(2.0), compute_sharing=one) for one in (1.0, 2.0, 1.25))
    assert Skew(2.0, ROWS, own).computed() == 2.0
    assert Skew(2.0, ROWS, shared).computed() == pytest.approx(1.5)
    assert Skew(2.0, ROWS, partly).computed() == pytest.approx(1.6)
    assert Skew(2.0, (), shared).computed() == 2.0  # where rows are is not known
    for sizes, on_own, on_shared in (((1, 2), 1.5, 1.5), ((2, 1), 1.25, 1.0), ((2, 2), 1.0, 1.0)):
        domains = ExpertDomains((2, 2), sizes)
        assert Skew(2.0, ROWS, own).computed(domains) == pytest.approx(on_own)
        assert Skew(2.0, ROWS, shared).computed(domains) == pytest.approx(on_shared)
        assert Skew(2.0, (), shared).computed(domains) == (1.0 if sizes == (2, 2) else 2.0)


def taking_turns(ranks: int, exchange: float, experts: float, shared: bool) -> float:
    """Returns the time of a pass, rank by rank: the link carries one rank's tokens at a time, there in
    turn, back as soon as it can.
    """
    processors, link, done = 0.0, exchange, []
    for rank in range(ranks):
        there = (rank + 1) * exchange / ranks
        begun = max(there, processors) if shared else there
        done.append(begun + (experts / ranks if shared else experts))
        processors = done[-1]
    for ready in done:
        link = max(link, ready) + exchange / ranks
    return link


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.booleans())
def test_two_ranks_of_a_node_take_turns_where_their_tokens_travel_apart(exchange, experts, shared):
    skew = Skew(1.0, (), replace(cluster(2.0), compute_sharing=2.0 if shared else 1.0))
    left = 2 * exchange + experts - skew.hidden(ExpertDomains((2, 2), (1, 2)), exchange, experts)
    assert left == pytest.approx(taking_turns(2, exchange, experts, shared))
    assert left >= max(2 * exchange, experts) - 1e-9


def test_ranks_that_exchange_with_each_other_or_have_links_of_their_own_hide_nothing():
    for sizes, sharing in (((1, 1), 2.0), ((2, 1), 2.0), ((2, 2), 2.0), ((1, 2), 1.0), ((1, 2), None)):
        assert Skew(1.0, (), cluster(sharing)).hidden(ExpertDomains((2, 2), sizes), 1.0, 1.0) == 0.0
    assert Skew(1.0, (), cluster(2.0)).hidden(ExpertDomains((4,), (2,)), 1.0, 1.0) == 0.0


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any), st.floats(1.0, 4.0))
def test_nothing_is_busier_than_the_busiest_rank_or_less_busy_than_the_mean(rows, sharing):
    imbalance = max(rows) * 4 / sum(rows)
    skew = Skew(imbalance, rows, replace(cluster(sharing), compute_sharing=sharing))
    assert 1 - 1e-9 <= skew.exchanged <= imbalance + 1e-9
    assert 1 - 1e-9 <= skew.computed() <= imbalance + 1e-9
    for sizes in ((1, 1), (1, 2), (2, 1), (2, 2)):
        for level in (0, 1):
            assert 1 - 1e-9 <= skew.of_regions(ExpertDomains((2, 2), sizes), level) <= imbalance + 1e-9
