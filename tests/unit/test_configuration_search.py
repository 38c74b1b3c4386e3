"""Partitions and strategy found by trials, against trying all of both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.configuration_search import ConfigurationSearch
from megatron_moe_opt.planning.partition_search import TOLERANCE

REUSE = ("S1", "S2", "S3", "S4")
ALL = ("none", *REUSE)


def _search(search, cost, tokens):
    trials = []
    while (configuration := search.trial(tokens)) is not None:
        assert trials.count(configuration) < 2
        trials.append(configuration)
        search.measured(tokens, configuration, cost(tokens, *configuration))
    return search.chosen[tokens], trials


work = st.fixed_dictionaries({strategy: st.tuples(st.floats(1, 100), st.floats(1, 1e4)) for strategy in ALL})


@given(work, st.dictionaries(st.sampled_from(REUSE), st.integers(1, 8), min_size=1), st.integers(2, 10**5))
def test_finds_the_fastest_that_is_allowed(work, least, tokens):
    """Of strategies whose cost is convex in n, to within the tolerance of a search."""

    def cost(tokens, n, strategy):
        a_token, a_partition = work[strategy]
        return tokens * a_token / n + a_partition * n

    search = ConfigurationSearch(ALL, lambda tokens, strategy: least.get(strategy))
    (n, strategy), _ = _search(search, cost, tokens)
    assert n >= least[strategy]
    fastest = min(cost(tokens, n, one) for one in least for n in range(least[one], 9))
    assert cost(tokens, n, strategy) <= fastest * (1 + TOLERANCE + 1e-9)
    assert search.seconds(tokens).get((n, strategy), 0) >= 0


def test_no_strategy_is_tried_where_none_needs_none():
    search = ConfigurationSearch(ALL, lambda tokens, strategy: 1 if tokens < 1000 else {"S3": 4, "S4": 2}.get(strategy))
    chosen, trials = _search(search, lambda tokens, n, strategy: 1 + abs(n - 2), 500)
    assert chosen == (2, "none") and {strategy for _, strategy in trials} == {"none"}
    chosen, trials = _search(search, lambda tokens, n, strategy: 1 + abs(n - 2) + (strategy == "S4") * 5, 5000)
    assert chosen == (4, "S3")
    turned = [(5, "S3")] * 2, [(5, "S4")] * 2  # measured again before it is believed
    assert trials == [(4, "S3"), *turned[0], (4, "S4"), *turned[1], (3, "S4"), (2, "S4")]
    # As many tokens, nearly: the same strategy, whose n must be searched for where its range does not hold them.
    chosen, trials = _search(search, lambda tokens, n, strategy: 1 + abs(n - 5), 7000)
    assert chosen == (5, "S3") and {strategy for _, strategy in trials} == {"S3"}
    with pytest.raises(LookupError, match="no strategy is allowed for 7000 tokens"):
        ConfigurationSearch(ALL, lambda tokens, strategy: None).trial(7000)


def test_strategies_whose_ranges_hold_the_tokens_are_still_compared():
    search = ConfigurationSearch(("S1", "S4"), lambda tokens, strategy: 1, counts=(1, 2))

    def cost(tokens, n, strategy):
        return 1 + n + (strategy == ("S1" if tokens < 100 else "S4"))

    assert _search(search, cost, 1000)[0] == (1, "S1")
    chosen, trials = _search(search, cost, 50)  # n is 1 for up to 1000 tokens: only the strategies are compared
    assert chosen == (1, "S4") and trials == [(1, "S1"), (1, "S4")]
