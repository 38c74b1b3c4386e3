"""Which candidates may still be the fastest, by the times that they took."""

from __future__ import annotations

import random
import statistics
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.choosing.contenders import WORTH, contenders, median_within

TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=20)


def test_of_few_times_all_and_of_many_the_middle_ones():
    assert median_within([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_within([float(time) for time in range(1, 17)]) == (5.0, 12.0)  # 16 / 2 - 4 on either side are out


@given(st.dictionaries(st.integers(), TIMES, min_size=1))
def test_the_leader_is_the_fastest_and_what_is_out_cannot_win_by_much(times):
    leader, *others = contenders(times)
    assert statistics.median(times[leader]) == min(map(statistics.median, times.values()))
    assert len({leader, *others}) == 1 + len(others) and {leader, *others} <= times.keys()
    for one in times.keys() - {leader, *others}:
        assert median_within(times[one])[0] >= median_within(times[leader])[1] * (1 - WORTH)


def test_one_disturbed_time_decides_nothing():
    assert contenders({"a": [1.0, 1.01, 9.0], "b": [1.1, 1.11, 1.12]}) == ("a", "b")
    steady = [1.0, 1.01, 1.02, 1.01, 1.0, 1.01, 1.02]
    assert contenders({"a": [*steady, 9.0], "b": [1.1 * time for time in steady]}) == ("a",)


def test_equal_times_need_no_more():
    """Neither may be faster than the other by more than is worth a trial."""
    assert contenders({"a": [1.0, 1.001, 1.002], "b": [1.0, 1.001, 1.002]}) == ("a",)


def test_more_times_tell_noisy_candidates_apart():
    """5 % of noise and 4 % between two: 3 times each seldom decide and seldom wrongly, 100 nearly always rightly."""
    generator = random.Random(1)

    def left(count: int) -> tuple[str, ...]:
        drawn = {one: [at * generator.gauss(1, 0.05) for _ in range(count)] for one, at in (("a", 1.0), ("b", 1.04))}
        return contenders(drawn)

    by_few, by_many = (Counter(left(count) for _ in range(200)) for count in (3, 100))
    assert by_few["b",] < 20 and by_few["a", "b"] + by_few["b", "a"] > 100
    assert by_many["b",] == 0 and by_many["a",] > 150
