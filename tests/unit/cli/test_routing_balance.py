"""Where rows go, on layouts counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.cli.bench.balance import balance, max_over_mean
from megatron_moe_opt.topology.layouts import Layout


def test_one_group():
    """Two ranks with two experts each."""
    chosen = [[1, 2, 3, 4], [10, 20, 30, 40]]
    made = balance(chosen, Layout(2, ep=2))
    assert made.of_expert == (11, 22, 33, 44)
    assert made.of_rank == (33, 77)


def test_shards_of_an_expert_see_all_its_rows():
    """Ranks 0 and 1 hold the halves of expert 0, ranks 2 and 3 those of expert 1."""
    made = balance([[1, 0], [2, 0], [4, 5], [8, 0]], Layout(4, tp=2, ep=2, expert_tp=2))
    assert made.of_rank == (15, 15, 5, 5)


def test_data_parallel_groups_keep_to_themselves():
    """Ranks 0 and 1 have experts 0 and 1 of their own, and so have ranks 2 and 3."""
    made = balance([[1, 2], [4, 0], [7, 7], [0, 1]], Layout(4, ep=2))
    assert made.of_expert == (12, 10)
    assert made.of_rank == (5, 2, 7, 8)


@given(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]), st.data())
def test_nothing_is_lost(sizes, data):
    ep, expert_tp = sizes
    world = 4
    rows = st.lists(st.integers(0, 100), min_size=2 * ep, max_size=2 * ep)
    chosen = [data.draw(rows) for _ in range(world)]
    made = balance(chosen, Layout(world, ep=ep, expert_tp=expert_tp))
    assert sum(made.of_expert) == sum(map(sum, chosen)) == sum(made.of_rank) / expert_tp


@pytest.mark.parametrize(("rows", "expected"), [((5, 5, 5), 1), ((0, 12, 0, 0), 4), ((3, 1), 1.5)])
def test_max_over_mean(rows, expected):
    assert max_over_mean(rows) == expected
