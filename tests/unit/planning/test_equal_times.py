from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.choosing.equal_times import EQUAL_WITHIN, fewest_of_equal

CANDIDATES = st.lists(st.tuples(st.floats(1e-6, 10), st.sampled_from((1, 2, 4, 8))), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([(1.0, 4, "a"), (1.02, 2, "b"), (1.04, 1, "c")], "b"),  # 3 % are equal, 4 % are not
        ([(1.02, 2, "a"), (1.01, 2, "b"), (1.0, 4, "c")], "b"),  # of as many parts, the faster
        ([(1.01 + 1e-12, 2, "a"), (1.01, 2, "b"), (1.0, 4, "c")], "a"),  # equal but for rounding: the first
        ([(9.0, 1, "a"), (1.0, 8, "b")], "b"),
        ([(0.0, 2, "a"), (0.0, 1, "b")], "b"),
    ],
)
def test_what_is_taken(candidates, chosen):
    assert fewest_of_equal(candidates) == chosen


@given(CANDIDATES)
def test_never_slower_than_allowed_and_never_more_parts_than_the_fastest(times):
    seconds, parts = fewest_of_equal([(seconds, parts, (seconds, parts)) for seconds, parts in times])
    least = min(times)
    assert seconds <= least[0] * (1 + EQUAL_WITHIN) * (1 + 1e-9)
    near = [parts for seconds, parts in times if seconds <= least[0] * (1 + EQUAL_WITHIN)]
    assert parts == min(near)
