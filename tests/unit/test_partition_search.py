"""Algorithm 1 against trying everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.choosing.contenders import contenders
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS, PartitionSearch

token_counts = st.lists(st.integers(0, 10**6), min_size=1, max_size=12)


def _cost(overhead, share):
    """Seconds of n partitions: what can be hidden shrinks with n, what each costs adds up. Convex in n; the best n
    rises with the tokens."""
    return lambda tokens, n: tokens * (share + (1 - share) / n) + overhead * n


costs = st.builds(_cost, st.floats(1, 1e5), st.floats(0, 1))


def _search(search, cost, tokens, least=1, start=None, repeated=2):
    """The best n, and how many trials it took."""
    trials, n = 0, search.known(tokens, least)
    if n is None:
        while turns := search.trial(tokens, least, start):
            for one in turns:
                search.measured(tokens, one, [cost(tokens, one)] * 4)
            trials += 1
            assert trials <= len(search.counts) + repeated  # at most two turning points, measured twice
        n = contenders(search.tried(tokens, least))[0]
    search.settle(tokens, least, n)
    return n, trials


def _consistent(search):
    """Ranges ascend with n and do not overlap."""
    ends = [end for floor_and_ceil in search.ranges.values() for end in floor_and_ceil]
    return list(search.ranges) == sorted(search.ranges) and ends == sorted(ends)


@given(costs, token_counts, st.none() | st.sampled_from(PARTITIONS))
def test_finds_what_trying_all_finds(cost, batches, start):
    search = PartitionSearch()
    for tokens in batches:
        n, _ = _search(search, cost, tokens, start=start)
        if tokens > 1:  # of one token it is taken for granted that it is not cut (line 1)
            assert cost(tokens, n) <= min(cost(tokens, other) for other in PARTITIONS) * (1 + 1e-9)
        assert _consistent(search)


@given(costs, token_counts, st.integers(1, 8))
def test_finds_the_best_of_those_that_are_allowed(cost, batches, least):
    search = PartitionSearch()
    for tokens in batches:
        n, _ = _search(search, cost, tokens, least=least)
        assert n >= least
        if tokens > 1:
            allowed = [other for other in PARTITIONS if other >= least]
            assert cost(tokens, n) <= min(cost(tokens, other) for other in allowed) * (1 + 1e-9)
        free, _ = _search(search, cost, tokens)  # what was learnt under a limit misleads no search without one
        if tokens > 1:
            assert cost(tokens, free) <= min(cost(tokens, other) for other in PARTITIONS) * (1 + 1e-9)
        assert _consistent(search)


@given(costs, st.integers(2, 10**6), st.floats(0, 0.01), st.none() | st.sampled_from(PARTITIONS), st.data())
def test_noise_costs_no_more_than_it_may_hide(cost, tokens, noise, start, data):
    """A fall that ends a search because noise hides it, goes on at most as steeply to the last n (convexity)."""

    def noisy(tokens, n):
        return cost(tokens, n) * (1 + data.draw(st.floats(-noise, noise), label=f"noise at {n}"))

    n, _ = _search(PartitionSearch(), noisy, tokens, start=start, repeated=8)
    best = min(cost(tokens, other) for other in PARTITIONS)
    either = (1 + noise) / (1 - noise)
    assert cost(tokens, n) * (1 - 7 * (either - 1)) <= best * either * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(PARTITIONS)), max_size=20), st.data())
def test_whatever_is_measured_it_ends_and_stays_in_order(asked, data):
    """Times that keep to no rule at all: it ends, and ranges are in order."""
    search = PartitionSearch()
    for tokens, least in asked:
        n, _ = _search(search, lambda tokens, n: data.draw(st.floats(1e-6, 1e3)), tokens, least=least, repeated=8)
        assert n in PARTITIONS and n >= least
        assert search.known(tokens, least) == n
        assert _consistent(search)


def test_the_ranges_of_algorithm_1():
    """Worked by hand: best n is 1 below 100 tokens, 2 below 200, 3 below 300, and so on."""
    tried = []

    def cost(tokens, n):
        tried.append((tokens, n))
        return 1 + abs(n - min(8, tokens // 100 + 1))

    search = PartitionSearch()
    assert search.ranges == {1: (0, 1), 8: (math.inf, math.inf)}
    assert _search(search, cost, 350) == (4, 6)  # 1 to 5, where it turns; that one twice
    assert search.ranges == {1: (0, 1), 4: (350, 350), 8: (math.inf, math.inf)}
    assert _search(search, cost, 390) == (4, 3)  # 4 and 5: it cannot be less than for 350
    assert search.ranges[4] == (350, 390)
    assert _search(search, cost, 370) == (4, 0)  # between the two
    assert _search(search, cost, 150) == (2, 4)
    assert _search(search, cost, 250) == (3, 4)  # 2, 3 and 4, between the neighbours
    assert _search(search, cost, 10) == (1, 3)
    assert _search(search, cost, 5000) == (8, 5)  # 4 to 8
    assert _search(search, cost, 9000) == (8, 0)
    assert search.ranges == {1: (0, 10), 2: (150, 150), 3: (250, 250), 4: (350, 390), 8: (5000, math.inf)}
    assert max(tried.count(one) for one in tried) == 2
    assert _search(search, cost, 350) == (4, 0)  # from the cache
    assert search.times(390) == {4: [1] * 8, 5: [2] * 8}


def test_begins_where_it_is_told():
    search = PartitionSearch()
    assert search.trial(1000, start=4) == (4,)
    assert _search(search, lambda tokens, n: 1 + abs(n - 5), 1000, start=4) == (5, 4)  # 4, 5, 6: fell, then rose
    assert _search(PartitionSearch(), lambda tokens, n: 1 + abs(n - 2), 1000, start=4) == (2, 7)  # 4, 5, then 3, 2, 1


def test_other_counts():
    cost = _cost(100.0, 0.0)
    assert _search(PartitionSearch((2, 4, 16, 64)), cost, 100 * 256) == (16, 5)
    assert _search(PartitionSearch((5,)), cost, 10**6)[0] == 5
    for counts in ((), (2, 1), (3, 3)):
        with pytest.raises(ValueError, match="do not ascend"):
            PartitionSearch(counts)
    with pytest.raises(ValueError, match="none of .* is as many as 9"):
        PartitionSearch().known(10, least=9)


def test_a_bump_does_not_end_a_search():
    """A measurement that was disturbed, once."""
    bumps = {3: 10.0}
    search = PartitionSearch()
    assert _search(search, lambda tokens, n: 1 + abs(n - 6) + bumps.pop(n, 0.0), 1000)[0] == 6


def test_what_turns_is_measured_again_beside_the_best():
    search = PartitionSearch()
    for n, seconds in ((1, 3.0), (2, 2.0), (3, 2.5)):
        assert search.trial(1000) == (n,)
        search.measured(1000, n, [seconds] * 4)
    assert search.trial(1000) == (2, 3)
    for n in (2, 3):  # both disturbed
        search.measured(1000, n, [9.0] * 4)
    assert search.trial(1000) == (4,)  # so nothing is known, and 3 may be faster


def test_what_may_be_as_fast_does_not_end_a_search():
    search = PartitionSearch()
    search.measured(1000, 1, [2.0, 2.1, 2.2, 2.3])
    search.measured(1000, 2, [2.05, 2.15, 2.25, 2.35])
    assert search.trial(1000) == (3,)
