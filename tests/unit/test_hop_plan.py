"""Plans of hops against tokens that are sent one by one."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.runtime.rows.hop_plan import DomainTables
from megatron_moe_opt.topology.domains import ExpertDomains


@st.composite
def routings(draw):
    """Domains, number of experts, and for each rank its tokens' experts."""
    workers = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    sizes = tuple(draw(st.sampled_from([s for s in range(1, w + 1) if w % s == 0])) for w in workers)
    world = prod(workers)
    experts = world * draw(st.integers(1, 2))
    token = st.lists(st.integers(0, experts - 1), max_size=min(experts, 4), unique=True)
    seed = draw(st.lists(token, max_size=8))
    shift = draw(st.integers(0, experts))
    tokens = [[[(e + shift * rank) % experts for e in t] for t in seed[rank % 3 :]] for rank in range(world)]
    return ExpertDomains(workers, sizes), experts, tokens


def send(domains, experts, tokens):
    """What every rank sends to each peer of each hop, and the (token's source, its place, expert) at each rank."""
    local = experts // domains.world
    place = [domains.location(rank) for rank in range(domains.world)]
    domain = [tuple(p // s for p, s in zip(place[rank], domains.sizes, strict=True)) for rank in range(domains.world)]
    held = [[(rank, index, frozenset(t)) for index, t in enumerate(tokens[rank])] for rank in range(domains.world)]
    sent = []
    for level in range(domains.levels):
        if domains.domains(level) == 1:
            continue
        counts = [[0] * domains.domains(level) for _ in range(domains.world)]
        arrived = [[] for _ in range(domains.world)]
        for group in domains.all_to_all_groups(level):
            for rank in group:
                for source, index, wanted in held[rank]:
                    for number, peer in enumerate(group):
                        there = frozenset(e for e in wanted if domain[e // local][level] == number)
                        if there:
                            counts[rank][number] += 1
                            arrived[peer].append((source, index, there))
        held = arrived
        sent.append(counts)
    return sent, held


@given(routings())
@settings(max_examples=60)
def test_plan_is_what_tokens_sent_one_by_one_add_up_to(routing):
    domains, experts, tokens = routing
    sent, held = send(domains, experts, tokens)
    tables = [DomainTables(domains, rank, experts) for rank in range(domains.world)]
    counts = torch.stack([count(table, tokens[rank]) for rank, table in enumerate(tables)])
    for rank, table in enumerate(tables):
        plan = table.plan(counts)
        for hop, level in enumerate(plan.hops):
            group = next(group for group in domains.all_to_all_groups(level) if rank in group)
            assert plan.hops[level].sent == sent[hop][rank]
            assert plan.hops[level].received == [sent[hop][peer][group.index(rank)] for peer in group]
        here = [expert for _, _, wanted in held[rank] for expert in wanted]
        owned = [owner * (experts // domains.world) + index
                 for owner in table.owners for index in range(experts // domains.world)]  # fmt: skip
        assert plan.tokens_per_expert.tolist() == [here.count(expert) for expert in owned]
        assert set(here) <= set(owned)
        assert table.place_in_domain[owned].tolist() == list(range(len(owned)))
        assert int((table.place_in_domain == len(owned)).sum()) == experts + 1 - len(owned)


def count(table, tokens):
    """A rank's counts, from a set for every token."""
    counts = [0] * table.num_counts
    for level, first in zip(table.levels, table.columns, strict=False):
        region = table.region_of_experts(level)
        for token in tokens:
            for number in {int(region[expert]) for expert in token}:
                counts[first + number] += 1
    for token in tokens:
        for expert in token:
            counts[table.columns[-1] + expert] += 1
    return torch.tensor(counts)


def test_hand_computed_tables():
    """2 data centres of 4 ranks, domains of 1 and 2, 2 experts a rank: rank 5 is in domain 0 of its centre."""
    table = DomainTables(ExpertDomains((2, 4), (1, 2)), rank=5, num_experts=16)
    assert table.owners == (4, 5)
    assert table.levels == (0, 1)
    assert table.region(0).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert table.region(1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table.next_domain(0).tolist() == [0] * 8 + [1] * 8 + [2]
    assert table.next_domain(1).tolist() == [2] * 8 + [0] * 4 + [1] * 4 + [2]
    assert table.place_in_domain.tolist() == [4] * 8 + [0, 1, 2, 3] + [4] * 5
    assert table.columns == (0, 2, 6)


def test_owners_are_in_the_order_of_gathering():
    """2 x 4 ranks, domains of 2 and 2: level 0 gathers (0 4), (1 5); then level 1 gathers (0 1): 0 4 1 5."""
    assert DomainTables(ExpertDomains((2, 4), (2, 2)), rank=5, num_experts=8).owners == (0, 4, 1, 5)
