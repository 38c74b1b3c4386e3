"""Plans of hops against tokens that are sent one by one."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.runtime.hops.hop_plan import DomainTables
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
        (plan,) = table.plan(counts.view(domains.world, 1, 1, 1, -1))
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


def num_counts(table):
    """How many counts a rank has."""
    return table.columns[-1] + table.num_experts


def count(table, tokens):
    """A rank's counts, from a set for every token."""
    counts = [0] * num_counts(table)
    for level, first in zip(table.levels, table.columns, strict=False):
        region = table.region_of_experts(level)
        for token in tokens:
            for number in {int(region[expert]) for expert in token}:
                counts[first + number] += 1
    for token in tokens:
        for expert in token:
            counts[table.columns[-1] + expert] += 1
    return torch.tensor(counts)


def plan_by_hand(table, counts):
    """(sent and received at each level, rows of each expert held) from int64 [G, num_counts], with PyTorch's ops."""
    domains, rank = table.domains, table.rank
    places = torch.tensor([domains.location(one) for one in range(domains.world)])
    offsets = places % torch.tensor(domains.sizes)

    def sources(rank, level):
        """The ranks whose tokens reach `rank` in the hops before `level`."""
        same = places == places[rank]
        same[:, :level] = offsets[:, :level] == offsets[rank, :level]
        return counts[same.all(1)].sum(0)

    hops = {}
    for level, first in zip(table.levels, table.columns, strict=False):
        group = next(group for group in domains.all_to_all_groups(level) if rank in group)
        regions = first + table.region(level)
        hops[level] = (
            [int(sources(rank, level)[regions[peer]]) for peer in group],
            [int(sources(peer, level)[regions[rank]]) for peer in group],
        )
    rows = sources(rank, domains.levels)[table.columns[-1] :].view(domains.world, -1)
    return hops, rows[list(table.owners)].flatten().tolist()


@given(routings(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_parts_and_shards_are_planned_as_each_by_itself(routing, etp_size, samples, parts, has_tokens, seed):
    """Whatever is counted: plans are sums of counts, and samples are added."""
    domains, experts, _ = routing
    generator = torch.Generator().manual_seed(seed)
    rank = int(torch.randint(domains.world, (), generator=generator))
    etp_rank = int(torch.randint(etp_size, (), generator=generator))
    table = DomainTables(domains, rank, experts)
    shape = domains.world, etp_size, samples, parts, num_counts(table) + has_tokens
    counts = torch.randint(9, shape, generator=generator)
    plans = table.plan(counts, etp_rank)
    assert len(plans) == parts
    for part, plan in enumerate(plans):
        of_shards = [
            plan_by_hand(table, counts[:, shard, :, part, : num_counts(table)].sum(1)) for shard in range(etp_size)
        ]
        assert {level: (hop.sent, hop.received) for level, hop in plan.hops.items()} == of_shards[etp_rank][0]
        held = torch.tensor([rows for _, rows in of_shards]).sum(0)
        assert plan.tokens_per_expert.equal(held) and plan.num_gathered == held.sum()
        stay = counts[rank, :, :, part, -1].sum(1).tolist() if has_tokens else [0] * etp_size
        arrived = [sum(hops[max(hops)][1]) if hops else stay[shard] for shard, (hops, _) in enumerate(of_shards)]
        assert plan.gather_counts == (tuple(arrived) if etp_size > 1 else ())


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_planning_64_ranks_asks_pytorch_for_no_arithmetic():
    """The host waits for nothing behind the counts' arrival: one list of all parts' experts is made, and cut."""
    table = DomainTables(ExpertDomains((8, 8), (1, 1)), rank=13, num_experts=256)
    counts = torch.ones(64, 2, 1, 4, num_counts(table) + 1, dtype=torch.int64)
    with Operations() as operations:
        plans = table.plan(counts, 1)
    assert operations.names == ["aten.empty.memory_format", *["aten.as_strided.default"] * len(plans)]


@pytest.mark.parametrize(
    ("counts", "arguments"),
    [
        (torch.zeros(4, 1, 1, 1, 10), ((2, 2), (1, 1), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 10, dtype=torch.int64), ((2, 2), (1, 1), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 9, dtype=torch.int64), ((2, 2), (1, 1), 4, 0, 0)),
        (torch.zeros(4, 1, 0, 1, 10, dtype=torch.int64), ((2, 2), (1, 1), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 2), (1,), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 2), (1, 0), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 3), (1, 1), 4, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 2), (1, 1), 3, 0, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 2), (1, 1), 4, 4, 0)),
        (torch.zeros(4, 1, 1, 1, 10, dtype=torch.int64), ((2, 2), (1, 1), 4, 0, 1)),
        (torch.full((4, 1, 1, 1, 10), -1), ((2, 2), (1, 1), 4, 0, 0)),
        (torch.full((4, 1, 1, 1, 10), 2**62), ((2, 2), (1, 1), 4, 0, 0)),
    ],
    ids=["dtype", "shape", "columns", "none", "levels", "size", "workers", "experts", "rank", "shard", "negative",
         "too many"],
)  # fmt: skip
def test_counts_that_make_no_plan_are_refused(counts, arguments):
    with pytest.raises(ValueError):
        load_extension().plan_hops(counts, *arguments)


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
