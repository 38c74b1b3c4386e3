"""Domain sizes on several levels: volumes against drawn experts, times against the simulator, the least of all."""

from __future__ import annotations

import dataclasses
import random
from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.predicting.expert_migration import MigrationLayer, least
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.topology.domains import ExpertDomains, realisable
from tools.papers.formulas.hybridep import Stream
from tools.papers.formulas.hybridep_levels import Link, TimedPass, link_curves, predict, stock_seconds, stock_sent

FORWARD = (TimedPass(500),)


def timed(before, experts, expert_bytes, collective=Kind.ALL_GATHER):
    return TimedPass(expert_bytes, collective, pre_expert_seconds=before, expert_seconds=experts)


def layer_of(topk=1, local_experts=1, tokens=1000, passes=FORWARD):
    return MigrationLayer(tokens, 16, topk, local_experts, passes)


def owner_of(expert, layer):
    return expert // layer.local_experts


@pytest.mark.parametrize(("workers", "local_experts", "topk"), [((6,), 1, 2), ((2, 4), 1, 3), ((2, 2, 2), 2, 2)])
def test_copies_are_those_of_all_draws(workers, local_experts, topk):
    """Every set of experts, every source: who sends how many tokens at which level, and never twice to one domain."""
    layer = layer_of(topk, local_experts)
    for domains in realisable(workers):
        sent, stay, draws = [0] * domains.levels, [0] * domains.levels, 0
        for source in range(domains.world):
            for experts in combinations(range(local_experts * domains.world), topk):
                draws += 1
                targets = {
                    tuple(
                        place // size
                        for place, size in zip(domains.location(owner_of(expert, layer)), domains.sizes, strict=True)
                    )
                    for expert in experts
                }
                mine = domains.location(source)
                for level in range(domains.levels):
                    for copy in {target[: level + 1] for target in targets}:
                        if copy[level] == mine[level] // domains.sizes[level]:
                            stay[level] += 1
                        else:
                            sent[level] += 1
        for level in range(domains.levels):
            everything = layer.exchanged(domains, level) / (layer.tokens * layer.row_bytes)
            assert everything == pytest.approx((sent[level] + stay[level]) / draws)
            crossing = layer.sent(domains, level) - 500 * prod(domains.sizes[:level]) * (domains.sizes[level] - 1)
            assert crossing / (2 * layer.tokens * layer.row_bytes) == pytest.approx(sent[level] / draws)


def test_volumes_by_hand():
    """4 data centres of 4 GPUs, domains of 2 and 4, two experts a GPU, 3 experts a token: 2 domains of 16 experts."""
    layer, domains = layer_of(topk=3, local_experts=2), ExpertDomains((4, 4), (2, 4))
    missing = 16 * 15 * 14 / (32 * 31 * 30)  # of the draws, in a domain
    assert layer.exchanged(domains, 0) == pytest.approx(16000 * 2 * (1 - missing))
    assert layer.exchanged(domains, 1) == layer.exchanged(domains, 0)  # which arrive, and stay where they are
    assert [layer.gathered(domains, level, layer.passes[0]) for level in (0, 1)] == [1000, 4000]
    assert layer.sent(domains, 0) == pytest.approx(2 * 16000 * (1 - missing) + 500)
    assert layer.sent(domains, 1) == 3000


def test_a_token_never_travels_more_often_than_its_experts():
    for topk in (1, 2, 4, 8):
        layer = layer_of(topk)
        for domains in realisable((4, 8)):
            copies = [layer.exchanged(domains, level) / 16000 for level in range(2)]
            regions = [domains.domains(0), domains.domains(0) * domains.domains(1)]
            assert all(copy <= min(topk, most) + 1e-12 for copy, most in zip(copies, regions, strict=True))
    assert layer_of(8).exchanged(ExpertDomains((4, 8), (1, 1)), 1) == pytest.approx(8 * 16000)  # one expert a GPU


def test_one_level_is_the_stream_model():
    rng = random.Random(3)
    for _ in range(100):
        gpus, bandwidth = rng.choice([2, 4, 6, 12, 32]), 10 ** rng.uniform(3, 6)
        one = timed(rng.choice([0.0, rng.uniform(0, 10)]), rng.uniform(0, 10), rng.randrange(1, 10**6))
        layer = layer_of(passes=(one,))
        stream = Stream(gpus, 16000, one.expert_bytes, bandwidth, one.pre_expert_seconds, one.expert_seconds)
        found = predict(layer, (gpus,), link_curves((gpus,), [Link(bandwidth)]))
        assert [choice.domains.sizes[0] for choice in found] == [s for s in range(1, gpus + 1) if gpus % s == 0]
        for choice in found:
            assert choice.seconds == pytest.approx(stream.seconds(choice.domains.proportion(0)), rel=1e-9)


def stream_schedule(layer, domains, one):
    """Experts gathered from the outermost level inwards, tokens there and back, level by level, in one lane."""
    ops = [Op(Kind.PERMUTE, Lane.COMPUTE, size=1)]

    def collectives(kind, levels, groups, size, first_waits_for=()):
        for level in levels:
            if groups(level) > 1:
                ops.append(Op(kind, Lane.INTER, level, size(level), first_waits_for, group=f"{level} {groups(level)}"))

    levels = range(domains.levels)
    collectives(
        one.collective, levels, lambda level: domains.sizes[level], lambda level: layer.gathered(domains, level, one)
    )
    for order in (levels, reversed(levels)):
        collectives(Kind.ALL_TO_ALL, order, domains.domains, lambda level: layer.exchanged(domains, level), (0,))
    ops.append(Op(Kind.COMPUTE, Lane.COMPUTE, size=1))
    return Schedule(f"stream of {domains}", tuple(ops))


def random_curve(rng):
    sizes = sorted(rng.sample(range(1, 10**6), 3))
    return CostCurve(tuple((size, rng.uniform(0.1, 1) * (index + 1)) for index, size in enumerate(sizes)))


@pytest.mark.parametrize("workers", [(12,), (4, 4), (3, 1, 6), (2, 2, 4)])
def test_every_choice_takes_what_the_simulator_says(workers):
    """They agree on measured curves of any shape, forward and backward."""
    rng = random.Random(prod(workers))
    for _ in range(10):
        kinds = (Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        groups = [(level, ranks) for level, most in enumerate(workers) for ranks in range(2, most + 1)]
        curves = {(kind, *group): random_curve(rng) for kind in kinds for group in groups}
        backward = timed(rng.uniform(0, 8), rng.uniform(0, 8), rng.randrange(10**5), Kind.REDUCE_SCATTER)
        passes = (timed(rng.uniform(0, 4), rng.uniform(0, 4), rng.randrange(10**5)), backward)
        layer = layer_of(rng.choice([1, 2]), rng.choice([1, 3]), rng.randrange(1, 2000), passes)
        collectives = {(kind, f"{level} {ranks}"): curve for (kind, level, ranks), curve in curves.items()}
        found = predict(layer, workers, curves)
        times = []
        for domains in realisable(workers):
            seconds = 0.0
            for one in passes:
                compute = {Kind.PERMUTE: one.pre_expert_seconds, Kind.COMPUTE: one.expert_seconds}
                of_one = {(kind, None): CostCurve(((1, taken),)) for kind, taken in compute.items()}
                costs = Costs({**collectives, **of_one})
                seconds += simulate(stream_schedule(layer, domains, one), costs).seconds
            times.append(seconds)
        assert [choice.seconds for choice in found] == pytest.approx(times, rel=1e-9)
        assert least(found).seconds == pytest.approx(min(times), rel=1e-9)


def test_of_equal_choices_the_one_that_holds_fewest_experts():
    free = layer_of(passes=(timed(1.0, 10.0, 500),))  # everything hides behind the experts
    choice = least(predict(free, (4, 4), link_curves((4, 4), [Link(1e9)] * 2)))
    assert (choice.domains.sizes, choice.holds, choice.seconds) == ((1, 1), 1, 11.0)


def test_slow_links_outside_make_experts_travel_there_alone():
    """Data centres at 1 kB/s, GPUs inside at 1 MB/s: 16 kB of tokens from each GPU or 500 bytes of experts."""
    workers = (4, 4)
    choice = least(predict(layer_of(), workers, link_curves(workers, [Link(1e3), Link(1e6)])))
    assert choice.domains.sizes[0] == 4
    heavy = layer_of(passes=(TimedPass(500_000),))
    choice = least(predict(heavy, workers, link_curves(workers, [Link(1e3), Link(1e6)])))
    assert choice.domains.sizes == (1, 1)


def test_given_links_by_hand():
    """3 of 4 parts of the bytes cross in 3 messages."""
    curves = link_curves((4, 2), [Link(100.0, 0.5), Link(1000.0)])
    assert set(curves) == {
        (kind, *group)
        for kind in (Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        for group in ((0, 2), (0, 4), (1, 2))
    }
    assert curves[Kind.ALL_TO_ALL, 0, 4].seconds(400) == pytest.approx(3 * 0.5 + 3.0)
    assert curves[Kind.ALL_GATHER, 0, 2].seconds(400) == pytest.approx(0.5 + 2.0)
    assert curves[Kind.REDUCE_SCATTER, 1, 2].seconds(0) == pytest.approx(0, abs=1e-12)


def test_stock_by_hand():
    """2 data centres of 4 GPUs: 4 of 8 peers are behind the slow link, 3 inside; 2 experts a token, sent twice."""
    layer = layer_of(topk=2, passes=(timed(1.0, 2.0, 500), timed(2.0, 4.0, 500, Kind.REDUCE_SCATTER)))
    slow, fast = Link(1e3, 0.5), Link(1e6)
    assert stock_seconds(layer, (2, 4), [slow, fast]) == pytest.approx((1 + 2 * 18) + (2 + 2 * 18))
    assert stock_seconds(layer, (2, 4), [fast, Link(1e2)]) == pytest.approx(3 + 4 * 120)
    assert stock_sent(layer, (2, 4), 0) == 4 * 16000
    assert stock_sent(layer, (2, 4), 1) == 4 * 12000


def test_stock_on_one_level_is_domain_size_1():
    layer, links = layer_of(topk=4, local_experts=1), [Link(1e3, 0.1)]
    (first, *_) = predict(layer, (8,), link_curves((8,), links))
    assert first.seconds == pytest.approx(stock_seconds(layer, (8,), links))
    assert layer.sent(first.domains, 0) == pytest.approx(stock_sent(layer, (8,), 0))


def test_thousands_of_workers():
    found = predict(layer_of(topk=8), (5040, 8), link_curves((5040, 8), [Link(1e6, 1e-4), Link(1e9)]))
    assert len(found) == 60 * 4
    times = {choice.domains.sizes: choice.seconds for choice in found}
    assert times[5040, 8] == pytest.approx(500 * 5039 / 1e6 + 5039e-4 + 500 * 5040 * 7 / 1e9)


def test_refusals():
    layer = layer_of(topk=9)
    with pytest.raises(ConfigurationError) as error:
        predict(layer, (8,), {})
    assert str(error.value) == "a token cannot have 9 of 8 experts: take a smaller top-k"
    with pytest.raises(ConfigurationError) as error:
        predict(layer_of(), (2, 2), {})
    assert str(error.value) == (
        "no cost curve for all_to_all at level 0 in a group of 2 ranks: measure that group, or give bandwidths"
    )
    for bandwidth, latency in ((0.0, 0.0), (float("nan"), 0.0), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError) as caught:
            Link(bandwidth, latency)
        assert str(caught.value) == f"bandwidth {bandwidth} and latency {latency} are not those of a link"


def test_a_popular_region_gets_at_most_one_copy_of_every_token():
    domains = ExpertDomains((2,), (1,))
    even = MigrationLayer.alone(100, 8, 1, 4, 0, 0)
    assert even.exchanged(domains, 0) == pytest.approx(100 * 8)  # one expert, one copy
    for imbalance, copies in ((1.5, 1.5), (3.0, 2.0)):
        layer = dataclasses.replace(even, imbalance=lambda *_, imbalance=imbalance: imbalance)
        assert layer.exchanged(domains, 0) == pytest.approx(copies * 100 * 8)


@given(st.integers(1, 2), st.integers(2, 3), st.integers(1, 4), st.data())
def test_copies_of_tokens_are_those_of_the_experts_that_have_room(local_experts, ranks, topk, data):
    """Counted over all draws, and over all choices of those experts of a draw that have room; between whole numbers of
    these it is their mean.
    """
    experts = local_experts * ranks
    topk = min(topk, experts)
    domains = ExpertDomains((ranks,), (1,))

    def copies(with_room: float) -> float:
        layer = MigrationLayer(1, 1, topk, local_experts, (), kept=with_room / topk)
        return layer.exchanged(domains, 0) / ranks

    number = data.draw(st.integers(0, topk))
    goes_to = [room for draw in combinations(range(experts), topk) for room in combinations(draw, number)]
    crossing = sum(any(expert < local_experts for expert in room) for room in goes_to) / len(goes_to)
    assert copies(number) == pytest.approx(crossing)
    if number < topk:
        part = data.draw(st.floats(0, 1))
        mean = (1 - part) * copies(number) + part * copies(number + 1)
        assert copies(number + part) == pytest.approx(mean, abs=1e-12)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4), st.data())
def test_a_popular_region_gets_the_copies_of_as_many_experts_as_its_share_is_worth(local_experts, ranks, topk, data):
    """Counted over all draws in which this many of all experts are behind the link."""
    experts = local_experts * ranks
    topk = min(topk, experts)
    behind = data.draw(st.integers(1, experts))
    layer = MigrationLayer(1, 1, topk, local_experts, (), lambda *_: behind * ranks / experts)
    draws = list(combinations(range(experts), topk))
    crossing = sum(any(expert < behind for expert in draw) for draw in draws) / len(draws)
    domains = ExpertDomains((ranks,), (1,))
    assert layer.exchanged(domains, 0) / ranks == pytest.approx(crossing)
    even = dataclasses.replace(layer, imbalance=lambda *_: 1.0)
    assert layer.exchanged(domains, 0) <= max(1.0, behind * ranks / experts) * even.exchanged(domains, 0) + 1e-9
