"""NetMoE's eq. 5 against the two stages, by brute force over all placements."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.costs.curves import AlphaBeta
from megatron_moe_opt.planning.costs.known_clusters import GB, NETMOE_A800
from megatron_moe_opt.planning.predicting.placement_volume import Volume, placement_volume
from tools.papers.formulas.netmoe import LinkSeconds, placement_seconds

DEVICES, NODE = np.arange(4), np.array([0, 0, 1, 1])
PLACEMENTS = [np.array(one) for one in permutations(range(4))]
counts = st.lists(st.integers(0, 20), min_size=16, max_size=16).map(lambda numbers: np.reshape(numbers, (4, 4)))
alphas = st.floats(0, 30)


def volumes(combine, dispatch, placement):
    return [placement_volume(num, placement, NODE) for num in (combine, dispatch)]


@settings(max_examples=60)
@given(counts, counts, alphas, alphas, st.floats(0.5, 16))
def test_two_stages_are_optimal_where_links_between_nodes_take_longest(combine, dispatch, outside, inside, beta):
    links = LinkSeconds(AlphaBeta(outside, beta), AlphaBeta(inside, 1.0))
    found = volumes(combine, dispatch, place_samples(combine + dispatch, DEVICES, NODE))
    if all(inter >= intra for inter, intra in map(links, found)):
        least = min(placement_seconds(volumes(combine, dispatch, one), links) for one in PLACEMENTS)
        assert placement_seconds(found, links) == pytest.approx(least)


def test_they_are_not_where_links_inside_do():
    """Two samples want device 1 a little more than device 2, two device 3 more than 0: both of two stay on a node."""
    num = np.array([[0, 11, 10, 0], [0, 11, 10, 0], [10, 0, 0, 11], [10, 0, 0, 11]])
    none = np.zeros_like(num)
    two_stages = place_samples(num, DEVICES, NODE)
    for beta, optimal in ((4.0, True), (0.1, False)):
        links = LinkSeconds(AlphaBeta(0.0, beta), AlphaBeta(0.0, 1.0))
        least = min(placement_seconds(volumes(num, none, one), links) for one in PLACEMENTS)
        found = volumes(num, none, two_stages)
        assert all(inter >= intra for inter, intra in map(links, found)) == optimal
        assert (placement_seconds(found, links) == pytest.approx(least)) == optimal


def test_eq_1_takes_the_longer_of_the_links():
    """Table 2's: a node's 100 GB/s for its 8 GPUs, of which 86 % are reached, and 80 % of each GPU's 200 GB/s."""
    links = LinkSeconds.of(NETMOE_A800, 16, latencies=False)
    volume = Volume(inter=10**9, intra=10**9, local=5)
    assert links(volume) == pytest.approx((1e9 / (2 * 0.86 * 100 * GB), 1e9 / (16 * 0.8 * 200 * GB)))
    assert placement_seconds([volume, volume], links) == pytest.approx(2 * links(volume)[0])
    first = LinkSeconds.of(NETMOE_A800, 16)
    assert first.inter.alpha - first.intra.alpha == pytest.approx(9.6e-6 - 3.4e-6 + 7e-6 - 3e-6)
