"""Expert domains: the paper's numbers, groups against Algorithm 1, and that tokens and experts meet."""

from __future__ import annotations

from itertools import permutations

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains, realisable

LEVELS = [(1,), (6,), (8,), (4, 4), (2, 1), (6, 4), (2, 3, 4), (4, 2, 1, 2)]

# HybridEP, Table VII: by EP size, (A2A, AG) of domain sizes 1, 2, 4, ...
TABLE_VII = {
    8: [(56, 0), (24, 8), (8, 24), (0, 56)],
    16: [(240, 0), (112, 16), (48, 48), (16, 112), (0, 240)],
    32: [(992, 0), (480, 32), (224, 96), (96, 224), (32, 480), (0, 992)],
}


def every_choice():
    return [domains for workers in LEVELS for domains in realisable(workers)]


def communication(domains, one, other, level):
    """What two ranks exchange at a level: ALL_GATHER, ALL_TO_ALL or nothing (Algorithm 1).

    The printed algorithm asks for the same place at the levels inside this one only. Then two GPUs of different data
    centres would gather over the links of a node: here the places at the levels outside must be the same too.
    """
    mine, its = domains.location(one), domains.location(other)
    if mine[:level] != its[:level] or mine[level + 1 :] != its[level + 1 :]:
        return None
    (domain, offset), (its_domain, its_offset) = (divmod(place[level], domains.sizes[level]) for place in (mine, its))
    if domain == its_domain and offset != its_offset:
        return Kind.ALL_GATHER
    if domain != its_domain and offset == its_offset:
        return Kind.ALL_TO_ALL
    return None


@pytest.mark.parametrize("ep", TABLE_VII)
def test_messages_of_table_vii(ep):
    found = [(domains.all_to_all_groups(0), domains.gather_groups(0)) for domains in realisable((ep,))]
    messages = [tuple(sum(len(group) * (len(group) - 1) for group in groups) for groups in both) for both in found]
    assert messages == TABLE_VII[ep]


def test_the_paper_s_example():
    """Fig. 8: 4 data centres of 4 GPUs; domains of 2 data centres and of all GPUs of one."""
    domains = ExpertDomains((4, 4), (2, 4))
    assert [domains.location(rank) for rank in (0, 3, 4, 7, 15)] == [(0, 0), (0, 3), (1, 0), (1, 3), (3, 3)]
    assert domains.gather_groups(0)[:5] == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12))
    assert domains.all_to_all_groups(0) == (
        (0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15),
    )  # fmt: skip
    assert domains.gather_groups(1) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert domains.all_to_all_groups(1) == tuple((rank,) for rank in range(16))
    assert (domains.proportion(0), domains.proportion(1)) == (2 / 3, 0)
    # Rank 5, of the second data centre: nothing over the links inside another one, whatever the printed algorithm says.
    assert communication(domains, 5, 1, 0) is Kind.ALL_GATHER
    assert communication(domains, 5, 13, 0) is Kind.ALL_TO_ALL
    assert communication(domains, 5, 9, 0) is None
    assert communication(domains, 5, 6, 1) is Kind.ALL_GATHER
    assert communication(domains, 5, 2, 1) is None


def test_experts_cross_nodes_where_a_domain_does():
    nodes = [rank // 4 for rank in range(16)]
    crosses = {sizes: ExpertDomains((4, 4), sizes).experts_cross_nodes(nodes) for sizes in ((1, 1), (1, 4), (2, 1))}
    assert crosses == {(1, 1): False, (1, 4): False, (2, 1): True}


def test_a_place_at_every_level_counts_in_mixed_radix():
    """Eq. 13: rank = (place 0 * 3 + place 1) * 4 + place 2."""
    domains = ExpertDomains((2, 3, 4), (1, 1, 1))
    places = [(a, b, c) for a in range(2) for b in range(3) for c in range(4)]
    assert [domains.location(rank) for rank in range(domains.world)] == places


@pytest.mark.parametrize("domains", every_choice(), ids=str)
def test_it_counts_the_groups_that_a_rank_is_in(domains):
    of_levels = [
        kind(level) for level in range(domains.levels) for kind in (domains.gather_groups, domains.all_to_all_groups)
    ]
    of_rank = [len(group) > 1 for groups in of_levels for group in groups if 0 in group]
    assert domains.groups == sum(of_rank) + (max(domains.sizes) > 1)


@pytest.mark.parametrize("domains", every_choice(), ids=str)
def test_groups_are_those_of_algorithm_1(domains):
    ranks = range(domains.world)
    for level in range(domains.levels):
        wanted = {kind: set() for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, None)}
        for pair in permutations(ranks, 2):
            wanted[communication(domains, *pair, level)].add(pair)
        for kind, groups in (
            (Kind.ALL_GATHER, domains.gather_groups(level)),
            (Kind.ALL_TO_ALL, domains.all_to_all_groups(level)),
        ):
            assert sorted(rank for group in groups for rank in group) == list(ranks)
            assert all(list(group) == sorted(group) for group in groups)
            assert [group[0] for group in groups] == sorted(group[0] for group in groups)
            found = {pair for group in groups for pair in permutations(group, 2)}
            assert found == wanted[kind]


def group_of(rank, groups):
    return next(group for group in groups if rank in group)


@pytest.mark.parametrize("domains", every_choice(), ids=str)
def test_tokens_and_experts_meet(domains):
    """Experts gathered level by level from the outermost; a token's hops, level by level, end where its expert is."""
    ranks = range(domains.world)
    held = {rank: {rank} for rank in ranks}
    for level in range(domains.levels):
        before = dict(held)
        for group in domains.gather_groups(level):
            for rank in group:
                held[rank] = set().union(*(before[other] for other in group))
    for source in ranks:
        for owner in ranks:
            at = source
            for level in range(domains.levels):
                group = group_of(at, domains.all_to_all_groups(level))
                at = group[domains.location(owner)[level] // domains.sizes[level]]
            assert owner in held[at]
    sizes = {len(owners) for owners in held.values()}
    held_by_each = 1
    for size in domains.sizes:
        held_by_each *= size
    assert sizes == {held_by_each}


def test_realisable_sizes():
    assert [domains.sizes for domains in realisable((4, 3))] == [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1), (4, 3)]
    assert [round(domains.proportion(0), 3) for domains in realisable((8,))] == [1, 0.857, 0.571, 0]
    assert ExpertDomains((1,), (1,)).proportion(0) == 1


@pytest.mark.parametrize(
    ("workers", "sizes", "sentence"),
    [
        ((8,), (3,), "expert domain size 3 does not divide the 8 workers of level 0: choose a divisor"),
        ((8, 4), (2, 8), "expert domain size 8 does not divide the 4 workers of level 1: choose a divisor"),
        ((8,), (0,), "expert domain size 0 does not divide the 8 workers of level 0: choose a divisor"),
        (
            (8, 4),
            (2,),
            "1 expert domain size(s) (2,) do not fit 2 level(s) (8, 4): give one for each level, and at least one "
            "level",
        ),
        (
            (),
            (),
            "0 expert domain size(s) () do not fit 0 level(s) (): give one for each level, and at least one level",
        ),
    ],
)
def test_refusals(workers, sizes, sentence):
    with pytest.raises(ConfigurationError) as error:
        ExpertDomains(workers, sizes)
    assert str(error.value) == sentence
